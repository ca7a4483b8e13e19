"""Speed and size of the prefix index compared with its targets: `python -m tests.bench.gateway.bench_index`."""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc

from engine.contract.keys import PrefixKey
from router.registry.cache_estimate import Taken
from router.registry.index import PrefixIndex
from router.views.types import PodId

CHAIN = 128


def chains(count: int, seed: int) -> list[tuple[PrefixKey, ...]]:
    """Return `count` chains of 128 keys; groups of 16 chains share the first 32 keys."""
    rng = random.Random(seed)
    made = []
    head: tuple[PrefixKey, ...] = ()
    for i in range(count):
        if i % 16 == 0:
            head = tuple(PrefixKey(rng.getrandbits(64)) for _ in range(CHAIN // 4))
        made.append(head + tuple(PrefixKey(rng.getrandbits(64)) for _ in range(CHAIN - len(head))))
    return made


def fill(index: PrefixIndex, prompts: list[tuple[PrefixKey, ...]], pods: int) -> int:
    """Report every chain from two pods; return the number of applied keys."""
    for i, keys in enumerate(prompts):
        for pod in (i % pods, (i * 7 + 3) % pods):
            index.apply(PodId(f"pod-{pod}"), (), (keys, (), ()))
    return 2 * CHAIN * len(prompts)


def match_us(index: PrefixIndex, prompts: list[tuple[PrefixKey, ...]], rounds: int = 3000) -> list[float]:
    """Return sorted microseconds of single matches of random chains, so that caches are cold."""
    rng = random.Random(3)
    times = []
    for _ in range(rounds):
        keys = rng.choice(prompts)
        start = time.perf_counter()
        index.match(keys, 0.0)
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def speculate_us(prompts: list[tuple[PrefixKey, ...]], capacity_tokens: int | None) -> list[float]:
    """Return sorted CPU microseconds for entering 40 keys, most of them new. `capacity_tokens`: size of each pod's
    cache, which is full; None: unknown."""
    index = PrefixIndex()
    times = []
    for i, keys in enumerate(prompts[:6000]):
        taken = None if capacity_tokens is None else Taken(2700, 64.0, capacity_tokens, 16)
        start = time.thread_time()
        index.speculate(PodId(f"pod-{i % 8}"), keys[:40], 0.01 * i, 600.0, taken)
        times.append((time.thread_time() - start) * 1e6)
    return sorted(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--pods", type=int, default=64)
    args = parser.parse_args()
    prompts = chains(args.keys * 64 // (CHAIN * 49), seed=1)

    index = PrefixIndex()
    start = time.perf_counter()
    applied = fill(index, prompts, args.pods)
    rate = applied / (time.perf_counter() - start)
    print(f"index: {len(index):,} keys on {args.pods} pods, two pods a key")
    print(f"apply          {rate:>12,.0f} keys/s    (target >= 300,000)")

    def show(name: str, times: list[float]) -> None:
        p99 = times[int(len(times) * 0.99)]
        print(f"{name:14} {statistics.median(times):>9.1f} us p50, {p99:.1f} us p99    (target <= 60)")

    show("match 128", match_us(index, prompts))
    for pod in range(args.pods):
        index.speculate(PodId(f"pod-{pod}"), prompts[pod], 0.0, 2.0)
        index.apply(PodId(f"pod-{pod}"), (), (prompts[0][:16], prompts[0][16:], ()))
    show("all pods hold", match_us(index, prompts[:1]))

    for name, capacity in (("speculate 40", None), ("in a full cache", 60_000)):
        times = speculate_us(prompts, capacity)
        print(f"{name:15} {statistics.median(times):>8.1f} us p50, {times[int(len(times) * 0.99)]:.1f} us p99")

    start = time.perf_counter()
    for pod in range(8):
        index.drop(PodId(f"pod-{pod}"))
    print(f"drop           {(time.perf_counter() - start) / 8 * 1e6:>9.1f} us a pod")
    pauses = []
    while True:
        start = time.perf_counter()
        if not index.sweep(2_000):
            break
        pauses.append((time.perf_counter() - start) * 1e3)
    print(f"sweep          {max(pauses):>9.2f} ms longest of {len(pauses)} pieces, {sum(pauses):.0f} ms in all")
    del index

    sample = chains(len(prompts) // 4, seed=2)
    packed = [[int(key) for key in keys] for keys in sample]
    tracemalloc.start()
    index = PrefixIndex()
    for i, keys in enumerate(packed):
        fresh = tuple(PrefixKey(key + 0) for key in keys)
        for pod in (i % args.pods, (i * 7 + 3) % args.pods):
            index.apply(PodId(f"pod-{pod}"), (), (fresh, (), ()))
        del fresh
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"memory         {used / len(index):>9.1f} bytes a key (tracemalloc, {len(index):,} keys)    (target <= 200)")


if __name__ == "__main__":
    main()
