"""The cost of telling other gateways about a request, and of hearing about requests from them: `python -m
tests.bench.gateway.bench_peer_sync`.

The figures are CPU time in us per request of 24 prefix keys, 8 of them a system prompt. Batches have 17 requests, as
for one of three gateways at 1,000 requests/s in total. *Path* is the part that the request itself waits for. Then the
bench uses a real Redis. It measures how late gateways hear of each other's requests. The gateways' own work is
included, because all of them run in this process. It also measures the share of a core that telling and hearing take in
this process; Redis's own CPU time is not included.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.contract.keys import PrefixKey
from router.peer_sync.codec import decode, encode
from router.peer_sync.messages import Life, Routed
from router.peer_sync.outbox import Outbox
from router.peer_sync.peers import Peers
from router.registry.wire import RedisWire, Wire
from router.views.types import PodId
from tests.redis_server import RedisServer, running_redis
from tests.router.peer_sync.ends import Assumptions, End

KEYS, SHARED, BATCH, ROUNDS = 24, 8, 17, 400
LOADS = ((2, 125.0), (4, 125.0), (3, 1000.0), (10, 1000.0))
"""Gateways, and total requests per second, for the measurements of lateness."""
LATENESS_S = 10.0
PODS = [PodId(f"10.0.0.{i}:8000") for i in range(64)]


def main() -> None:
    """Print medians."""
    rng = random.Random(1)
    head = tuple(PrefixKey(rng.getrandbits(64)) for _ in range(SHARED))
    outbox = Outbox(Life(1), "gateway-1", 256)
    others = Peers(Assumptions(PODS), Life(2))
    path_s, encode_s, decode_s, apply_s, sizes = [], [], [], [], []
    for turn in range(ROUNDS):
        now_s = turn * 0.05
        chains = [head + tuple(PrefixKey(rng.getrandbits(64)) for _ in range(KEYS - SHARED)) for _ in range(BATCH)]
        session_id = f"{rng.getrandbits(128):032x}"
        started_s = time.process_time()
        for i, keys in enumerate(chains):
            number = outbox.next_number()
            outbox.routed(Routed(0.0, number, PODS[i], keys, 1500, 1000, 128, session_id), now_s)
            outbox.began(number, now_s, None)
            outbox.ended(number, now_s)
        path_s.append(time.process_time() - started_s)
        data, spent_s = timed(partial(taken, outbox, now_s))
        encode_s.append(spent_s)
        sizes.append(len(data))
        message, spent_s = timed(partial(decode, data))
        decode_s.append(spent_s)
        _, spent_s = timed(partial(others.apply, message, now_s, now_s))
        apply_s.append(spent_s)
    for name, seconds in (("path", path_s), ("encode", encode_s), ("decode", decode_s), ("index, load", apply_s)):
        print(f"{name:12} {statistics.median(seconds) / BATCH * 1e6:6.1f} us a request")
    print(f"{'wire':12} {statistics.median(sizes) / BATCH:6.0f} bytes a request")
    for gateways, rate in LOADS:
        with running_redis() as server:
            asyncio.run(lateness(server, gateways, rate))


async def lateness(server: RedisServer, gateways: int, rate: float) -> None:
    """Print how late gateways hear of requests, if `rate` requests per second go to the gateways in turn."""
    rng = random.Random(1)
    wires = [(RedisWire(server.url), RedisWire(server.url)) for _ in range(gateways)]
    ends = [Listening(number + 1, PODS, pair) for number, pair in enumerate(wires)]
    for end in ends:
        await end.start()
    await asyncio.sleep(1.0)
    clock = asyncio.get_running_loop().time
    began_s, began_cpu_s = clock(), time.process_time()
    chain = tuple(PrefixKey(rng.getrandbits(64)) for _ in range(KEYS))
    next_s = clock()
    for number in range(round(rate * LATENESS_S)):
        next_s += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, next_s - clock()))
        end = ends[number % gateways]
        now_s = clock()
        place = end.outbox.next_number()
        session_id = f"{int(now_s * 1e9):032x}"
        end.outbox.routed(Routed(0.0, place, PODS[number % 64], chain, 1500, 1000, 128, session_id), now_s)
        asyncio.get_running_loop().call_later(0.1, end.outbox.began, place, now_s + 0.1, None)
        asyncio.get_running_loop().call_later(0.3, end.outbox.ended, place, now_s + 0.3)
    cores = (time.process_time() - began_cpu_s) / (clock() - began_s) / gateways
    late_s = sorted(late_s for end in ends for late_s in end.late_s)
    sent = sum(end.sender.sent for end in ends)
    print(
        f"{gateways} gateways, {rate:4.0f} requests/s: heard {1e3 * statistics.mean(late_s):5.1f} ms late on average,"
        f" median {1e3 * late_s[len(late_s) // 2]:5.1f}, p90 {1e3 * late_s[len(late_s) * 9 // 10]:5.1f};"
        f" {sent / LATENESS_S:4.0f} messages/s, {100 * cores:4.1f} % of a core for each gateway"
    )
    for end in ends:
        await end.stop()


class Listening(End):
    """A gateway that measures how late it hears of others' requests."""

    def __init__(self, number: int, pods: Sequence[PodId], wires: tuple[Wire, Wire]) -> None:
        super().__init__(number, pods, wires)
        self.late_s: list[float] = []
        routed = self.sink.routed

        def heard(event: Routed, at_s: float) -> None:
            self.late_s.append(asyncio.get_running_loop().time() - int(event.session_id, 16) / 1e9)
            routed(event, at_s)

        self.sink.routed = heard  # type: ignore[method-assign]


def taken(outbox: Outbox, now_s: float) -> bytes:
    """Return the message with everything that the outbox has not yet told."""
    return encode(outbox.take(now_s))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work` and its CPU time in seconds."""
    started_s = time.process_time()
    made = work()
    return made, time.process_time() - started_s


if __name__ == "__main__":
    main()
