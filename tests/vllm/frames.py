"""The frames that a vLLM server publishes over ZMQ, unchanged.

    python -m tests.vllm.frames FILE        # starts a server and records the scenario below

A recording is a sequence of msgpack arrays `[topic, sequence, payload]`, each a byte string: the parts of one message.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.vllm.environment import Environment, make_checkpoint
from tests.vllm.servers import MODEL, ServerSpec, VllmServer, running_servers

Frames = tuple[bytes, bytes, bytes]
QUIET_S = 1.0
REPLAY_S = 10.0
END = b"\xff" * 8
"""The sequence number -1, which closes a replay."""
SMALL_POOL = ServerSpec(blocks=24, max_model_len=640, max_num_seqs=4)
"""A pool so small that a few prompts of 5 blocks evict others."""


@dataclass(slots=True)
class Batch:
    """One message, decoded."""

    topic: bytes
    sequence: int
    value: Any

    @property
    def events(self) -> list[Any]:
        """Return the events of a batch that is an array."""
        events: list[Any] = self.value[1]
        return events


def decoded(frames: Frames) -> Batch:
    """Decode the parts of one message."""
    topic, sequence, payload = frames
    return Batch(topic, int.from_bytes(sequence, "big"), msgpack.unpackb(payload, strict_map_key=False))


class Subscription:
    """Everything published since the block began."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def until_quiet(self, quiet_s: float = QUIET_S, deadline_s: float = 20.0) -> list[Frames]:
        """Return the messages until none has come for `quiet_s` seconds."""
        found: list[Frames] = []
        give_up_at = time.monotonic() + deadline_s
        while self._socket.poll(int(quiet_s * 1000)):
            topic, sequence, payload = self._socket.recv_multipart()
            found.append((topic, sequence, payload))
            assert time.monotonic() < give_up_at, f"messages come without end: {len(found)} in {deadline_s:g} s"
        return found


@contextlib.contextmanager
def subscribed(server: VllmServer) -> Iterator[Subscription]:
    """Yield a connected subscriber of the server's events."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.subscribe(b"")
        with _connected(socket):
            socket.connect(f"tcp://127.0.0.1:{server.events_port}")
        yield Subscription(socket)


@contextlib.contextmanager
def _connected(socket: zmq.Socket[bytes], deadline_s: float = 10.0) -> Iterator[None]:
    """Wait at the block's end until the connection made in it is up, because messages sent before that are lost."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        yield
        assert monitor.poll(int(deadline_s * 1000)), f"no ZMQ greeting within {deadline_s:g} s"
        time.sleep(0.2)  # the subscription itself is a message that the publisher has to read
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)  # `disable_monitor` does not close it


def replayed(server: VllmServer, first: int) -> list[list[bytes]]:
    """Return the server's replay from sequence number `first` on, with its end."""
    answers: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{server.replay_port}")
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while not answers or END not in answers[-1]:
            assert socket.poll(int(REPLAY_S * 1000)), f"the replay has no end after {len(answers)} messages"
            answers.append(socket.recv_multipart())
    return answers


def complete(server: VllmServer, prompt: str, session: str, **more: Any) -> dict[str, Any]:
    """Send one completion to the server itself."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Session-ID": session},
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        done: dict[str, Any] = json.loads(answer.read())
    return done


def scenario(server: VllmServer) -> None:
    """Send requests that cause every event: blocks stored, reused, salted, evicted, and the whole cache emptied."""
    about = {
        name: f"{name} keeps the ledger of the harbour office, page by page. " * 9 for name in ("Ada", "Ben", "Cleo")
    }
    complete(server, about["Ada"] + "Who signs?", "ada-1")
    complete(server, about["Ada"] + "Since when?", "ada-2")  # its first blocks are reused, so they are not reported
    complete(server, about["Ada"] + "Who signs?", "ada-salted", cache_salt="tenant-a")
    for name in ("Ben", "Cleo", "Ada"):
        complete(server, about[name] + "And then?", f"{name.lower()}-3")  # by now the pool is full
    server.reset_cache()
    complete(server, "All is empty now, " + about["Ben"], "ben-4")  # its batch begins with the emptying
    complete(server, "short", "no whole block")


def write(path: Path, messages: Iterable[Frames]) -> None:
    """Write a recording."""
    with path.open("wb") as file:
        for frames in messages:
            file.write(msgpack.packb(list(frames)))


def read(path: Path) -> list[Frames]:
    """A recording's messages, in order."""
    with path.open("rb") as file:
        return [(topic, sequence, payload) for topic, sequence, payload in msgpack.Unpacker(file, raw=False)]


def main() -> None:
    """See the module."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.vllm.frames FILE")
    environment = Environment.default()
    if not environment.is_ready:
        sys.exit(f"no vLLM in {environment.folder}: `python -m tests.vllm.environment` installs one")
    with tempfile.TemporaryDirectory(prefix="wr-vllm-") as scratch:
        folder = Path(scratch)
        checkpoint = make_checkpoint(folder)
        with (
            running_servers(environment.binaries, checkpoint, folder, [SMALL_POOL]) as (server,),
            subscribed(server) as subscription,
        ):
            scenario(server)
            messages = subscription.until_quiet()
    write(Path(sys.argv[1]), messages)
    for frames in messages:
        batch = decoded(frames)
        print(
            batch.sequence, [{**event, "token_ids": "..."} if "token_ids" in event else event for event in batch.events]
        )


if __name__ == "__main__":
    main()
