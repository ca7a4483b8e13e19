"""How late gateways hear of each other by design, and the cost for Redis.

    python -m tests.bench.gateway.bench_peer_sync_pace

The bench runs in virtual time, with the production publishers and readers and a server that takes 0.1 ms either way and
no CPU. So only the pauses between messages and between reads make gateways late, and the figures are the same on every
machine; `bench_peer_sync_late` shows what a real machine adds.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import looptime

from engine.contract.keys import prefix_keys
from router.peer_sync import pace
from router.peer_sync.messages import Routed
from router.registry.wire import Entry
from router.views.types import PodId
from tests.router.peer_sync.ends import End, ScriptedServer, ScriptedWire

LOADS = ((2, 50.0), (2, 500.0), (4, 125.0), (10, 2000.0))
"""Gateways, and total requests per second."""
IN_BATCHES = {"ROUTED_S": pace.REST_S, "BURST": 1, "READ_S": 0.01}
"""The constants of `pace` in the version that told the destinations of requests together with all other
news."""
SECONDS = 4.0
TRIP_S = 0.0001
PODS = [PodId(f"pod-{number}") for number in range(8)]
CHAINS = [prefix_keys(bytes([number]) * 512, 0, 256) for number in range(64)]


class CountingServer(ScriptedServer):
    """Wakes the readers that wait for a message, and counts commands."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: Counter[str] = Counter()
        self.written = asyncio.Event()


class PromptWire(ScriptedWire):
    """A wire to the counting server."""

    def __init__(self, server: CountingServer) -> None:
        super().__init__(server)
        self._counting = server

    async def append(self, stream: str, fields: Mapping[bytes, bytes], *, oldest_s: float, kept_s: float) -> None:
        self._counting.commands["XADD"] += 1
        await super().append(stream, fields, oldest_s=oldest_s, kept_s=kept_s)
        self._counting.written.set()
        self._counting.written = asyncio.Event()
        await asyncio.sleep(TRIP_S)

    async def read(self, tails: Mapping[str, bytes], block_ms: int) -> list[tuple[str, list[Entry]]]:
        self._counting.commands["XREAD"] += 1
        deadline_s = asyncio.get_running_loop().time() + block_ms / 1000
        while True:
            written = self._counting.written
            found = await super().read(tails, 0)
            left_s = deadline_s - asyncio.get_running_loop().time()
            if found or left_s <= 0:
                await asyncio.sleep(TRIP_S)
                return found
            try:
                async with asyncio.timeout(left_s):
                    await written.wait()
            except TimeoutError:
                pass

    async def _check(self) -> None:
        await asyncio.sleep(TRIP_S)


class Listening(End):
    """A gateway that measures how late it hears of others' requests."""

    def __init__(self, number: int, pods: Sequence[PodId], server: CountingServer) -> None:
        super().__init__(number, pods, (PromptWire(server), PromptWire(server)))
        self.late_s: list[float] = []
        routed = self.sink.routed

        def heard(event: Routed, at_s: float) -> None:
            self.late_s.append(asyncio.get_running_loop().time() - at_s)
            routed(event, at_s)

        self.sink.routed = heard  # type: ignore[method-assign]


async def play(count: int, rate: float) -> str:
    """Play the requests of `count` gateways, in turn, at random times."""
    rng, server, loop = random.Random(1), CountingServer(), asyncio.get_running_loop()
    ends = [Listening(number + 1, PODS, server) for number in range(count)]
    for end in ends:
        await end.start()
    await asyncio.sleep(3.0)
    server.commands.clear()
    for end in ends:
        end.late_s.clear()
    end_s = (next_s := loop.time()) + SECONDS
    number = 0
    while (next_s := next_s + rng.expovariate(rate)) < end_s:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        outbox = ends[number % count].outbox
        place, pod = outbox.next_number(), PODS[number % len(PODS)]
        outbox.routed(Routed(0.0, place, pod, rng.choice(CHAINS), 1500, 1000, 128, "0" * 32), loop.time())
        loop.call_later(0.02, outbox.began, place, loop.time() + 0.02, None)
        loop.call_later(0.1, outbox.ended, place, loop.time() + 0.1)
        number += 1
    late_ms = sorted(1e3 * late_s for end in ends for late_s in end.late_s)
    commands = {name: times / SECONDS for name, times in server.commands.items()}
    for end in ends:
        await end.kill()
    return (
        f"mean {sum(late_ms) / len(late_ms):5.1f}, median {late_ms[len(late_ms) // 2]:5.1f},"
        f" p99 {late_ms[len(late_ms) * 99 // 100]:5.1f} ms late; {commands['XADD']:4.0f} messages/s,"
        f" {commands['XREAD']:5.0f} reads/s, {sum(commands.values()):5.0f} commands/s"
    )


def main() -> None:
    """Print two rows for each load: told at once, and in batches with all other news."""
    for count, rate in LOADS:
        for name, changes in (("at once", {}), ("in batches", IN_BATCHES)):
            usual = {constant: getattr(pace, constant) for constant in changes}
            loop = looptime.new_event_loop(noop_cycles=1)
            try:
                for constant, value in changes.items():
                    setattr(pace, constant, value)
                found = loop.run_until_complete(play(count, rate))
                print(f"{count:2} gateways, {rate:4.0f} requests/s, {name:10}: {found}")
            finally:
                loop.close()
                for constant, value in usual.items():
                    setattr(pace, constant, value)


if __name__ == "__main__":
    main()
