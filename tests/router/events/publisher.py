"""A scripted publisher of KV events over real ZMQ sockets, as in vLLM: PUB for events, and ROUTER for replays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq

from tests.router.events.model_engine import ModelEngine

WAIT_S = 30.0


class Publisher:
    """Publishes the events of a model engine. `topics`: whether replays have the topic, as in vLLM from 0.12 on."""

    def __init__(self, engine: ModelEngine, context: zmq.Context[Any], *, topics: bool, topic: bytes = b"") -> None:
        self.engine = engine
        self.topic = topic
        self._topics = topics
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self.port = self.replay_port = 0
        self.sent = 0
        self.asked: list[int] = []
        self.answers = True

    async def start(self, connect_to: str | None = None) -> None:
        """Bind, after a restart to the same ports as before; or connect the PUB socket to `connect_to`."""
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        if connect_to is not None:
            self._pub.connect(connect_to)
        else:
            self.port = await bound(self._pub, self.port)
        self.replay_port = await bound(self._router, self.replay_port)
        self._loop.add_reader(self._router.fileno(), self._serve)

    def stop(self) -> None:
        """Close both sockets, as a process that ends does."""
        if self._router is not None:
            self._loop.remove_reader(self._router.fileno())
            self._router.close(0)
        if self._pub is not None:
            self._pub.close(0)
        self._pub = self._router = None

    def publish(self, *, lost: bool = False) -> None:
        """Publish all events of the engine since the last call. `lost`: nobody receives them."""
        assert self._pub is not None
        for seq in range(self.sent, len(self.engine.batches)):
            if not lost:
                self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), self.engine.batches[seq]])
        self.sent = len(self.engine.batches)

    def _serve(self) -> None:
        while self._router is not None:
            try:
                who, empty, first = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            assert empty == b""
            self.asked.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            for seq in range(self.asked[-1], self.sent):
                head = [who, b"", self.topic] if self._topics else [who, b""]
                self._router.send_multipart([*head, seq.to_bytes(8, "big"), self.engine.batches[seq]])
            self._router.send_multipart([who, b"", *([b""] if self._topics else []), b"\xff" * 8, b""])


async def bound(socket: zmq.Socket[bytes], port: int) -> int:
    """Bind the socket to the port, or to any port, and return it. A port that was just closed is busy for a moment."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            except zmq.ZMQError:
                await asyncio.sleep(0.02)
            else:
                return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the condition, at most WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def publishing(
    engine: ModelEngine, *, topics: bool = True, topic: bytes = b"", connect_to: str | None = None
) -> AsyncIterator[Publisher]:
    """Run a publisher while the block lasts."""
    context: zmq.Context[Any] = zmq.Context()
    publisher = Publisher(engine, context, topics=topics, topic=topic)
    await publisher.start(connect_to)
    try:
        yield publisher
    finally:
        publisher.stop()
        with contextlib.suppress(zmq.ZMQError):
            context.destroy(0)
