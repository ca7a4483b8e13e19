"""Streams over real sockets: gaps, restarts, publishers that go away, that connect, or are too old for sessions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import zmq

from router.events import follow, subscribe
from router.events.feed import SILENT_AFTER, EventFeed
from router.events.follow import Source, Streams
from router.registry.index import PrefixIndex
from router.views.types import PodId
from tests.router.events.model_engine import MODEL, STRIDE, ModelEngine, keys_of, uniform_tokens
from tests.router.events.publisher import Publisher, publishing, until

POD = PodId("pod")
TEXT = bytes(65 + at % 23 for at in range(STRIDE * 12))


class Gateway:
    """The streams of a gateway with its index."""

    def __init__(self, *, bind: str | None = None) -> None:
        self.index = PrefixIndex()
        self.clock = asyncio.get_running_loop().time
        self.feed = EventFeed(self.index, stride=STRIDE, belief_ttl_s=600.0, clock=self.clock)
        self.streams = Streams(self.feed, bind=bind)
        self.requests = 0

    def believed(self, text: bytes = TEXT, pod: PodId = POD) -> int:
        """Return how many keys of a prompt the pod is believed to hold."""
        match = self.index.match(keys_of(text), self.clock()).get(pod)
        return match.strides if match else 0

    def serve(self, engine: ModelEngine, text: bytes = TEXT, pod: PodId = POD, *, says_session: bool = True) -> None:
        """Send a request through this gateway."""
        session = f"session {self.requests}"
        self.requests += 1
        tokens = [token for token, _ in uniform_tokens(text)]
        self.feed.on_routed(pod, session, keys_of(text), len(tokens), self.clock(), prompt_bytes=len(text))
        engine.serve(tokens, session if says_session else None)
        self.feed.on_answered(pod, session, len(tokens))


@contextlib.asynccontextmanager
async def gateway(*, bind: str | None = None) -> AsyncIterator[Gateway]:
    """Run a gateway that follows streams while the block lasts."""
    here = Gateway(bind=bind)
    task = asyncio.create_task(here.streams.run())
    await asyncio.sleep(0)
    try:
        yield here
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled(), task.exception()


def source(publisher: Publisher, *, replays: bool = True, life: str = "") -> Source:
    """Return the publisher's addresses."""
    return Source(MODEL, "127.0.0.1", 8000, publisher.port, publisher.replay_port if replays else None, life)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "CHECK_S", 0.2)
    monkeypatch.setattr(subscribe, "RECONNECT_MS", 20)
    monkeypatch.setattr(subscribe, "SLOWEST_RECONNECT_MS", 100)


@pytest.mark.parametrize("topics", [True, False])
async def test_what_was_stored_before_is_replayed_and_evictions_are_seen(topics: bool) -> None:
    """`topics`: whether replayed messages have the topic."""
    engine = ModelEngine(room=24, block_tokens=4)
    async with publishing(engine, topics=topics) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: bool(publisher.asked))
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.believed() == len(keys_of(TEXT)))
        assert here.streams.state(POD) == "following"
        other = bytes(reversed(TEXT))
        here.serve(engine, other)
        publisher.publish()
        await until(lambda: here.believed(other) == len(keys_of(other)))
        await until(lambda: here.believed() == 12)  # 24 blocks have room for two prompts of 12
        engine.serve([-at for at in range(40)], None)
        publisher.publish()
        await until(lambda: here.believed() == 2)  # the ten new blocks have evicted the prompt's last ten


async def test_a_gap_is_replayed_and_a_lost_tail_is_found_by_a_check() -> None:
    """When the last event is lost, no later event shows the gap: only a check finds it."""
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: bool(publisher.asked))
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.believed() == 12)
        engine.clear()
        publisher.publish(lost=True)
        await until(lambda: here.believed() == 0)
        here.serve(engine)
        publisher.publish(lost=True)
        here.serve(engine, TEXT + TEXT[::-1])
        publisher.publish()
        await until(lambda: here.believed(TEXT + TEXT[::-1]) == 24)
        status = here.streams.status(POD)
        assert status is not None
        assert status["lost"] == status["restarts"] == 0


async def test_an_answer_to_a_check_does_not_lead_to_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "CHECK_S", 1000.0)
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: here.streams.state(POD) == "waiting")
        for turns in range(1, 4):
            here.serve(engine, TEXT * turns)
            publisher.publish()
            await until(lambda: here.believed(TEXT * turns) == 12 * turns)  # noqa: B023  # is called at once
        assert publisher.asked == [0], "once, when it connected"


async def test_without_replay_a_gap_forgets_and_what_follows_is_believed() -> None:
    """The names of blocks are remembered. So if a later event continues a block, that block is known to be cached."""
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher, replays=False)})
        await until(lambda: here.streams.state(POD) == "waiting")
        await asyncio.sleep(0.2)  # nothing shows when the subscription is ready
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.believed() == 12)
        engine.serve([1, 2, 3, 4], None)
        publisher.publish(lost=True)
        engine.serve([5, 6, 7, 8], None)
        publisher.publish()
        await until(lambda: here.believed() == 0)
        here.serve(engine, TEXT + TEXT[::-1])
        publisher.publish()
        await until(lambda: here.believed() == 12)
        assert here.streams.totals()["lost"] == 1


async def test_a_restart_forgets_and_its_first_batches_count() -> None:
    """The engine ends, and another one starts at the same ports and publishes more than the first."""
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: bool(publisher.asked))
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.believed() == 12)
        publisher.stop()
        publisher.engine, publisher.sent = ModelEngine(room=64, block_tokens=4), 0
        await publisher.start()
        other = TEXT[::-1]
        here.serve(publisher.engine, other)
        publisher.engine.clear()
        here.serve(publisher.engine, other)
        publisher.publish(lost=True)
        await until(lambda: here.believed() == 0 and here.believed(other) == 12)
        assert here.streams.totals()["restarts"] == 1


async def test_a_stream_that_is_gone_is_believed_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on, what the events reported is only believed, and the pod is treated as one that reports nothing."""
    monkeypatch.setattr(subscribe, "STALE_S", 0.3)
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: bool(publisher.asked))
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.believed() == 12)
        assert here.feed.reports(POD)
        publisher.stop()
        await until(lambda: not here.feed.reports(POD))
        assert here.streams.state(POD) == "unheard"
        await until(lambda: here.index.statistics().speculative == 12)
        assert here.believed() == 12
        await publisher.start()
        await until(lambda: here.feed.reports(POD))
        await until(lambda: here.index.statistics().speculative == 0)
        assert here.believed() == 12


async def test_a_replay_that_is_not_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later events are still read. The missing ones are lost, and the status says so."""
    monkeypatch.setattr(subscribe, "REPLAY_S", 0.2)
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        publisher.answers = False
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: here.streams.state(POD) == "waiting")
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.believed() == 12)
        status = here.streams.status(POD)
        assert status is not None
        assert status["failed_replays"] >= 1
        publisher.answers = True
        await until(lambda: (here.streams.status(POD) or {})["failed_replays"] == 0)


@contextlib.contextmanager
def no_sockets(here: Gateway) -> Iterator[None]:
    """Leave the gateway's streams no socket, as in a process that has no free descriptor."""
    context = here.streams._zmq()
    taken: list[zmq.Socket[bytes]] = []
    with contextlib.suppress(zmq.ZMQError):
        while True:
            taken.append(context.socket(zmq.PAIR))
    try:
        yield
    finally:
        for socket_ in taken:
            socket_.close(0)


async def test_a_lack_of_sockets_ends_no_stream_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sockets are lacking when the stream begins, and at a check that needs a new one after an unanswered check."""
    monkeypatch.setattr(follow, "_MAX_SOCKETS", 8)
    monkeypatch.setattr(follow, "RETRY_S", 0.1)
    monkeypatch.setattr(subscribe, "SLOWEST_CHECK_S", 0.2)
    monkeypatch.setattr(subscribe, "REPLAY_S", 0.2)
    engine = ModelEngine(room=64, block_tokens=4)

    def failed(here: Gateway) -> int:
        return int((here.streams.status(POD) or {"failed_replays": 0})["failed_replays"])

    async with publishing(engine) as publisher, gateway() as here:
        with no_sockets(here):
            here.streams.set_sources({POD: source(publisher)})
            await until(lambda: "Too many open files" in caplog.text)
        await until(lambda: here.streams.state(POD) == "waiting")
        publisher.answers = False
        await until(lambda: failed(here) >= 1)
        with no_sockets(here):
            before = failed(here)
            await until(lambda: failed(here) >= before + 2)
        publisher.answers = True
        here.serve(engine)
        publisher.publish()
        await until(lambda: here.streams.state(POD) == "following")
        assert here.believed() == 12


async def test_an_engine_too_old_for_sessions_is_said_to_be_one() -> None:
    """Its pod is treated as one that reports nothing."""
    engine = ModelEngine(room=256, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher)})
        await until(lambda: bool(publisher.asked))
        for at in range(SILENT_AFTER // 12 + 1):
            here.serve(engine, bytes([65 + at]) + TEXT, says_session=False)
        publisher.publish()
        await until(lambda: here.streams.state(POD) == "no_sessions")
        assert not here.feed.reports(POD)


async def test_engines_that_connect_are_told_apart_by_topic() -> None:
    """Two engines connect from one address."""
    one, two = ModelEngine(room=64, block_tokens=4), ModelEngine(room=64, block_tokens=4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bind = f"tcp://127.0.0.1:{port}"
    async with (
        gateway(bind=bind) as here,
        publishing(one, topic=b"kv@127.0.0.1:8001@m", connect_to=bind) as first,
        publishing(two, topic=b"kv@127.0.0.1:8002@m", connect_to=bind) as second,
    ):
        here.streams.set_sources(
            {
                PodId("one"): Source(MODEL, "127.0.0.1", 8001, None, first.replay_port),
                PodId("two"): Source(MODEL, "127.0.0.1", 8002, None, second.replay_port),
            }
        )
        here.serve(one, TEXT, PodId("one"))
        here.serve(two, TEXT[::-1], PodId("two"))
        first.publish()
        second.publish()
        await until(lambda: here.believed(TEXT, PodId("one")) == 12 and here.believed(TEXT[::-1], PodId("two")) == 12)
        assert here.believed(TEXT, PodId("two")) == here.believed(TEXT[::-1], PodId("one")) == 0


async def test_batches_of_a_pods_last_life_do_not_count_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway hears of a restart while it reads a busy stream, whose next piece is already in the loop's queue."""
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        here.streams.set_sources({POD: source(publisher, replays=False, life="1")})
        await until(lambda: here.streams.state(POD) == "waiting")
        heard, batch = [], here.feed.batch

        def hear(pod_id: PodId, payload: bytes) -> None:
            batch(pod_id, payload)
            heard.append(payload)
            if len(heard) == 1:
                new = Source(MODEL, "127.0.0.1", 8000, 1, None, "2")
                asyncio.get_running_loop().call_soon(here.streams.set_sources, {POD: new})

        while here.streams._streams[POD][0].life == "1":
            stream = here.streams._streams[POD][1]
            monkeypatch.setattr(stream._order, "_apply", partial(hear, POD))
            for _ in range(3 * subscribe.PIECE):
                engine.clear()
            publisher.publish()
            time.sleep(0.05)  # noqa: ASYNC251  # all are in the socket before the loop reads the first
            await asyncio.sleep(0.05)  # nothing shows when the subscription is ready
        counts = here.feed.counts(POD)
        assert counts is not None
        assert counts.batches == 0


async def test_a_pod_that_is_gone_leaves_nothing_behind() -> None:
    """Neither the index nor the streams keep anything of the pod, and its slot is free for another pod."""
    engine = ModelEngine(room=64, block_tokens=4)
    async with publishing(engine) as publisher, gateway() as here:
        for life in range(3):
            here.streams.set_sources({POD: source(publisher, life=str(life))})
            here.serve(engine, TEXT + bytes([70 + life]) * STRIDE)
            publisher.publish()
            await until(lambda: here.believed() == 12)
            here.streams.set_sources({})
            assert here.believed() == 0
            assert here.streams.status(POD) is None
        assert follow.Streams.totals(here.streams)["batches"] >= 3
