"""The subscriber that reads a server's events, against a scripted publisher and replay. Runs without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq

from tests.vllm.frames import END, Frames, decoded, read, replayed, subscribed, write

RECORDING = Path(__file__).with_name("frames_vllm_0_32.bin")
MESSAGES: list[Frames] = [(b"", number.to_bytes(8, "big"), msgpack.packb([0.5, []])) for number in range(5)]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


def test_a_subscriber_hears_all_from_its_first_moment(context: zmq.Context[Any]) -> None:
    with context.socket(zmq.PUB) as publisher:
        server: Any = SimpleNamespace(events_port=publisher.bind_to_random_port("tcp://127.0.0.1"))
        with subscribed(server) as subscription:
            for frames in MESSAGES:
                publisher.send_multipart(frames)
            assert subscription.until_quiet(5.0)[: len(MESSAGES)] == MESSAGES


def test_a_replay_is_read_to_its_end(context: zmq.Context[Any]) -> None:
    with context.socket(zmq.ROUTER) as router:
        server: Any = SimpleNamespace(replay_port=router.bind_to_random_port("tcp://127.0.0.1"))

        def answer() -> None:
            client, _, first = router.recv_multipart()
            for frames in MESSAGES[int.from_bytes(first, "big") :]:
                router.send_multipart([client, b"", *frames])
            router.send_multipart([client, b"", b"", END, b""])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert replayed(server, 3) == [[b"", *frames] for frames in MESSAGES[3:]] + [[b"", b"", END, b""]]
        finally:
            thread.join(10)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "frames", MESSAGES)
    assert read(tmp_path / "frames") == MESSAGES


def test_the_recording_of_vllm_has_every_event_once_at_least() -> None:
    batches = [decoded(frames) for frames in read(RECORDING)]
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    kinds = {event["type"] for batch in batches for event in batch.events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
