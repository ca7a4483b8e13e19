"""Small pieces of an answer go out at once: none waits in a socket for an acknowledgement (40 ms on Linux)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop
from aiohttp import web

from engine.common.sse import DONE
from router.engines.upstream import WHOLE_BYTES
from router.startup.parts import ENGINES
from tests.router.rig.helpers import DEADLINE_S, Gateway, ScriptedEngine, event, running, streams
from tests.router.rig.raw_client import RawClient, connected, head

FIRST_TOKEN_S = 0.1
PIECES = 30
"""Enough pieces, because Linux does not delay the acknowledgements of a connection's first few."""
BEGUN = b"!"
GAP_S = 0.001
"""The pause between pieces; it leaves no time for a delayed acknowledgement."""
LATE_S = 0.005
TRIES = 20
"""A piece has to be in time in only one try, because the machine may be busy in other tries. If sockets delay, some
piece is late in every try."""

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
BODY = b'{"model": "m", "prompt": "x", "stream": true}'
REQUEST = head(b"Content-Type: application/json", b"Content-Length: %d" % len(BODY)) + BODY


def run(loop: Loop, main: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


@LOOPS
def test_nodelay_is_set_on_both_sides(loop: Loop) -> None:
    async def main() -> None:
        engine = ScriptedEngine("a", streams([event("a"), DONE], gap_s=0.2))
        async with (
            running(engine) as gateway,
            gateway.session.post(f"{gateway.url}/v1/completions", data=BODY) as answer,
        ):
            to_engine = [c.transport for pool in gateway.app[ENGINES]._pools.values() for c in pool._open]
            to_client = [c.transport for c in gateway.runner.server.connections]  # type: ignore[union-attr]
            assert len(to_engine) == len(to_client) == 1
            for transport in to_engine + to_client:
                assert transport is not None
                assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await answer.read()

    run(loop, main())


class Pieces:
    """An answer in pieces, and how long each piece took to reach the client."""

    def __init__(self, content_type: str, pieces: list[tuple[bytes, bytes]]) -> None:
        self._content_type = content_type
        self._pieces = pieces
        """The bytes to write, and the last bytes that must reach the client at once (empty: none)."""
        self._wanted: asyncio.Queue[tuple[bytes, float]] = asyncio.Queue()
        self._has_come = asyncio.Event()

    async def play(self, request: web.Request) -> web.StreamResponse:
        """The engine's script."""
        response = web.StreamResponse(headers={"Content-Type": self._content_type})
        await response.prepare(request)
        await asyncio.sleep(FIRST_TOKEN_S)
        for data, arrives in self._pieces:
            await response.write(data)
            if arrives:
                self._has_come.clear()
                self._wanted.put_nowait((arrives, time.perf_counter()))
                await self._has_come.wait()  # otherwise two pieces might arrive as one
            await asyncio.sleep(GAP_S)
        return response

    async def delays_s(self, gateway: Gateway) -> list[float]:
        """Ask, and return for each piece the seconds from the writing of its last byte until it arrived."""
        delays_s, received = [], b""
        async with connected(gateway) as client, asyncio.timeout(DEADLINE_S):
            client.send(REQUEST)
            for _ in range(sum(bool(arrives) for _, arrives in self._pieces)):
                arrives, written_s = await self._wanted.get()
                delay_acknowledgements(client)
                while not (end := received.find(arrives + b"\r\n") + 1):  # the end of a chunk
                    received = received[-8:] + await client.reader.read(2**16)
                received = received[end:]
                if arrives != BEGUN:
                    delays_s.append(time.perf_counter() - written_s)
                self._has_come.set()
        return delays_s


def delay_acknowledgements(client: RawClient) -> None:
    """Delay acknowledgements, as a client that also sends does; Linux stops delaying them by itself."""
    if hasattr(socket, "TCP_QUICKACK"):
        client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)


async def in_some_try(pieces: Pieces) -> None:
    best: list[float] = []
    async with running(ScriptedEngine("a", pieces.play)) as gateway:
        for _ in range(TRIES):
            delays_s = await pieces.delays_s(gateway)
            best = list(map(min, best, delays_s)) if best else delays_s
            if max(best) < LATE_S:
                return
    pytest.fail(f"pieces that took longer than {LATE_S} s in each of {TRIES} answers: {max(best):.3f} s of {best}")


@LOOPS
def test_events_that_come_byte_by_byte_go_out_with_their_last_byte(loop: Loop) -> None:
    """The engine sends a head, 100 ms later a first token, then single bytes. Clients cannot use less than an event."""
    heartbeat = [(b":", b""), (b"\n", b""), (b"\n", b"\n\n")]
    pieces = Pieces("text/event-stream", [(event("first"), b"\n\n"), *PIECES * heartbeat])
    run(loop, in_some_try(pieces))


@LOOPS
def test_single_bytes_of_an_answer_that_is_passed_on_as_it_comes_go_out_one_by_one(loop: Loop) -> None:
    """Every answer that is larger than what the gateway keeps is passed on in this way."""
    pieces = Pieces("application/json", [(b"." * WHOLE_BYTES + BEGUN, BEGUN), *PIECES * [(b"x", b"x")]])
    run(loop, in_some_try(pieces))
