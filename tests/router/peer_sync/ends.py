"""Gateways that share beliefs, for tests: the production sender and reader, over Redis or over a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from engine.contract.events import Keys
from engine.contract.keys import PrefixKey
from engine.contract.redis_keys import STREAM_DATA_FIELD
from router.peer_sync.messages import InFlight, Life, Routed
from router.peer_sync.outbox import BACKLOG_BYTES, Outbox
from router.peer_sync.peers import Peers
from router.peer_sync.reader import PeerReader
from router.peer_sync.sender import PeerSender
from router.peer_sync.write_plan import WritePlan
from router.registry.index import PrefixIndex
from router.registry.speculative_entries import Run
from router.registry.wire import Entry, RedisClock, Wire
from router.views.types import PodId

STRIDE = 256
TTL_S = 600.0


class ScriptedServer:
    """The parts of Redis that gateways need, in this process, with Redis's faults."""

    def __init__(self, ahead_s: float = 1e9) -> None:
        """`ahead_s`: how many seconds the server's clock is ahead of the loop's."""
        self.ahead_s = ahead_s
        self.entries: list[tuple[int, bytes]] = []
        """The stream's entries: id and message."""
        self.strings: dict[str, bytes] = {}
        self.is_away = False
        self.loses = 0
        """The number of coming messages that the server confirms but loses."""
        self.delay_s = 0.0
        """Seconds until the next message reaches the server."""
        self._last = 0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    def trim(self) -> None:
        """Empty the stream."""
        self.entries.clear()

    def flush(self) -> None:
        """Remove everything."""
        self.entries.clear()
        self.strings.clear()


class ScriptedWire:
    """A Wire to a scripted server."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    async def time(self) -> float:
        await self._check()
        return self._server.now_s()

    async def append(self, stream: str, fields: Mapping[bytes, bytes], *, oldest_s: float, kept_s: float) -> None:
        await self._check()
        server = self._server
        delay_s, server.delay_s = server.delay_s, 0.0
        await asyncio.sleep(delay_s)
        server._last = max(server._last + 1, int(server.now_s() * 1000) * 1000)
        if server.loses:
            server.loses -= 1
            return
        ((_, data),) = fields.items()
        server.entries.append((server._last, data))
        while server.entries[0][0] < oldest_s * 1_000_000:
            server.entries.pop(0)

    async def newest(self, stream: str) -> bytes:
        await self._check()
        return _id(self._server.entries[-1][0]) if self._server.entries else b"0-0"

    async def read(self, tails: Mapping[str, bytes], block_ms: int) -> list[tuple[str, list[Entry]]]:
        await self._check()
        ((stream, after),) = tails.items()
        for _ in range(2):
            found = [_entry(number, data) for number, data in self._server.entries if number > _number(after)]
            if found:
                return [(stream, found)]
            await asyncio.sleep(block_ms / 1000)
        return []

    async def range(self, stream: str, since_s: float, until: bytes) -> AsyncIterator[list[Entry]]:
        await self._check()
        first, last = since_s * 1_000_000, _number(until)
        yield [_entry(number, data) for number, data in self._server.entries if first <= number <= last]

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._check()
        return [self._server.strings.get(key) for key in keys]

    async def put(self, key: str, data: bytes, kept_s: float) -> None:
        await self._check()
        self._server.strings[key] = data

    async def revive(self, stream: str) -> None:
        """See Wire."""

    async def reset(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _check(self) -> None:
        await asyncio.sleep(0.001)
        if self._server.is_away:
            raise ConnectionError("away")


def _entry(number: int, data: bytes) -> Entry:
    return _id(number), (STREAM_DATA_FIELD, data)


def _id(number: int) -> bytes:
    return f"{number // 1000}-{number % 1000}".encode()


def _number(entry_id: bytes) -> int:
    ms, _, n = entry_id.partition(b"-")
    return int(ms) * 1000 + int(n)


class Assumptions:
    """A PeerSink that has an index and knows the requests in flight."""

    def __init__(self, pods: Sequence[PodId]) -> None:
        self.index = PrefixIndex()
        self.pods = set(pods)
        self.in_flight: dict[str, tuple[PodId, bool]] = {}
        """Peer gateways' requests: request -> its pod, and whether it has begun."""
        self.heard: list[tuple[PodId, str, Keys, int, float]] = []

    def knows(self, pod: PodId) -> bool:
        return pod in self.pods

    def routed(self, event: Routed, at_s: float) -> None:
        self.index.speculate(event.pod, event.keys, at_s, TTL_S)
        self.heard.append((event.pod, event.session_id, event.keys, event.prompt_tokens, at_s))

    def sent(self, event: Routed | InFlight, request: str, at_s: float) -> None:
        assert request not in self.in_flight
        self.in_flight[request] = event.pod, False

    def began(self, pod: PodId, request: str, at_s: float) -> None:
        assert self.in_flight[request][0] == pod
        self.in_flight[request] = pod, True

    def finished(self, pod: PodId, request: str, at_s: float) -> None:
        assert self.in_flight.pop(request)[0] == pod

    def gone(self, gateway: str) -> None:
        assert not any(request.startswith(f"{gateway}.") for request in self.in_flight)

    def undone(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        self.index.forget_unused(pod, keys, used_at_s)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, at_s: float) -> None:
        self.index.refute(pod, keys, held_strides, at_s)
        self.index.speculate(pod, keys, at_s, TTL_S)

    def forgotten(self, pod: PodId, at_s: float) -> None:
        self.index.forget_until(pod, at_s)

    def assume(self, pod: PodId, runs: Sequence[Run]) -> None:
        self.index.assume(pod, runs, asyncio.get_running_loop().time(), TTL_S)

    def assumed(self, pod: PodId) -> Sequence[Run] | None:
        return self.index.assumed(pod) if pod in self.pods else None

    def keys(self, pod: PodId) -> set[PrefixKey]:
        return {key for _, keys in self.index.assumed(pod) for key in keys}


class End:
    """One gateway: its sender, its reader and what it assumes."""

    def __init__(
        self,
        number: int,
        pods: Sequence[PodId],
        wires: tuple[Wire, Wire],
        *,
        stride: int = STRIDE,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self.sink = Assumptions(pods)
        self.outbox = Outbox(Life(number), f"gateway-{number}", stride, backlog_bytes)
        self.peers = Peers(self.sink, Life(number))
        plan, clock = WritePlan(Life(number)), RedisClock()
        self.sender = PeerSender(wires[0], self.outbox, self.peers, self.sink, plan, clock)
        self.reader = PeerReader(wires[1], self.outbox, self.peers, self.sink, plan, clock)
        self._wires = wires
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.reader.set_pods(self.sink.pods, ())
        self._tasks = [asyncio.create_task(self.sender.run()), asyncio.create_task(self.reader.run())]

    async def kill(self) -> None:
        """End the gateway without a last message."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for wire in self._wires:
            await wire.close()

    async def stop(self) -> None:
        """Stop the gateway in an orderly way, with a last message."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.sender.close()
        await self._wires[1].close()

    def route(self, pod: PodId, keys: Keys, *, tokens: int = 100) -> int:
        """Send a request to the pod, and return its number."""
        now_s = asyncio.get_running_loop().time()
        self.sink.index.speculate(pod, keys, now_s, TTL_S)
        number = self.outbox.next_number()
        self.outbox.routed(Routed(0.0, number, pod, keys, tokens, tokens, 10, "0" * 32), now_s)
        return number

    def undo(self, pod: PodId, keys: Keys, number: int, sent_at_s: float) -> None:
        """Report that the request never ran."""
        self.outbox.ended(number, asyncio.get_running_loop().time())
        self.outbox.undone(pod, tuple(self.sink.index.retract(pod, keys)), sent_at_s)

    def refute(self, pod: PodId, keys: Keys, held: int) -> None:
        """Report that an answer showed that the pod held less."""
        now_s = asyncio.get_running_loop().time()
        self.sink.refuted(pod, keys, held, now_s)
        self.outbox.refuted(pod, keys, held, 0, now_s)

    def forget(self, pod: PodId) -> None:
        """Report that the pod was emptied."""
        self.sink.index.drop(pod)
        self.outbox.forgotten(pod, asyncio.get_running_loop().time(), is_sure=True)
