"""Hit rates of the orders of eviction compared with Belady's optimum, and the cost of a million blocks.

    python -m tests.bench.engine.bench_eviction [--traces FOLDER] [--only agentic] [--memory]

Requests come one after another. Rates are hit blocks / requested blocks; `hot`: only for blocks of hot prefixes. A
folder with Mooncake's `conversation_trace.jsonl` and `synthetic_trace.jsonl` (gzip or not) adds these two traces.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache

Request = tuple[int, ...]
"""Ids of a request's blocks, from the first. Equal ids at the same place after equal prefixes are equal blocks."""
ATTENTION = 1 / 300
"""Relative extra cost of a token for each block before it. With 512 tokens per block, attention costs as much as
everything else at 150,000 tokens (Llama 3.1 8B on an H100)."""
CHAIN = 64
USUAL_SHARES = (0.01, 0.02, 0.05, 0.1, 0.25)
HOT_SHARES = (0.001, 0.002, 0.004, 0.01)
SHARES = {"in turn": (0.25, 1 / 3, 1 / 2, 2 / 3, 0.9)}
"""Sizes of the pool, relative to the number of different blocks."""


@dataclass(frozen=True)
class Trace:
    """Requests, and for each the number of leading blocks that belong to a hot prefix."""

    name: str
    requests: Sequence[Request]
    hot: Sequence[int] | None = None


def flood(unique_each: int = 4, rounds: int = 4000, seed: int = 1) -> Trace:
    """Return 16 hot prefixes of 64 blocks; `unique_each` requests that never recur follow each hot request."""
    rng = random.Random(seed)
    prefixes = [tuple(range(i * CHAIN + 1, (i + 1) * CHAIN + 1)) for i in range(16)]
    fresh = 1_000_000
    requests: list[Request] = []
    hot: list[int] = []
    for _ in range(rounds):
        for is_hot in [True] + [False] * unique_each:
            length = 4 if is_hot else CHAIN
            own = tuple(range(fresh, fresh + length))
            fresh += length
            requests.append(rng.choice(prefixes) + own if is_hot else own)
            hot.append(CHAIN if is_hot else 0)
    return Trace(f"hot prefixes, {unique_each}:1 unique", requests, hot)


def agentic(conversations: int = 120, turns: int = 40, seed: int = 2) -> Trace:
    """Return agents that share 6 blocks and grow by about 7 blocks per turn to 280; a tenth of them work at a time."""
    rng = random.Random(seed)
    fresh = 1_000_000
    shared = tuple(range(1, 7))
    waiting = [shared] * conversations
    left = [turns] * conversations
    active = list(range(conversations // 10))
    coming = conversations // 10
    requests: list[Request] = []
    while active:
        agent = rng.choice(active)
        grown = rng.randint(3, 11)
        waiting[agent] += tuple(range(fresh, fresh + grown))
        fresh += grown
        requests.append(waiting[agent])
        left[agent] -= 1
        if not left[agent]:
            active.remove(agent)
            if coming < conversations:
                active.append(coming)
                coming += 1
    return Trace("agentic", requests)


def in_turn(blocks: int = 9000, laps: int = 12, seed: int = 5) -> Trace:
    """Return prompts of 16 to 128 blocks in a repeated sequence."""
    rng = random.Random(seed)
    prompts: list[Request] = []
    start = 1
    while start < blocks:
        length = rng.randint(16, 128)
        prompts.append(tuple(range(start, start + length)))
        start += length
    return Trace("in turn", prompts * laps)


def mooncake(path: Path, limit: int | None = None) -> Trace:
    """Return the hash ids of a Mooncake trace, 512 tokens each."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as lines:
        requests = [tuple(json.loads(line)["hash_ids"]) for line in lines]
    return Trace(path.name.split(".")[0], requests[:limit])


def hit_rates(trace: Trace, blocks: int, eviction: Eviction) -> tuple[float, float]:
    """Return the hit rates of all blocks, and of the blocks of hot prefixes."""
    cache = PrefixCache(blocks, 1, eviction=eviction)
    cache.learn_cost(1.0, ATTENTION)
    hits = asked = hot_hits = hot_asked = 0
    for i, request in enumerate(trace.requests):
        sequence = cache.open(request)
        cached = cache.admit(sequence, len(request))
        if cached is None:
            continue
        cache.commit(sequence, len(request))
        cache.release(sequence)
        hits += cached
        asked += len(request)
        if trace.hot is not None and trace.hot[i]:
            hot_hits += min(cached, trace.hot[i])
            hot_asked += trace.hot[i]
    return hits / asked, hot_hits / hot_asked if hot_asked else 0.0


def optimum(trace: Trace, blocks: int) -> tuple[float, float]:
    """Return the same rates for Belady's optimum. It evicts the block whose next use is latest, and never a parent
    before its child. Like an engine, it holds all blocks of the running request."""
    ids: dict[tuple[int, int], int] = {}
    chains: list[list[int]] = []
    for request in trace.requests:
        node, chain = 0, []
        for block in request:
            node = ids.setdefault((node, block), len(ids) + 1)
            chain.append(node)
        chains.append(chain)
    never = len(chains)
    next_use = [0] * (len(ids) + 1)
    upcoming: list[list[int]] = []
    last = [never] * (len(ids) + 1)
    for t in reversed(range(len(chains))):
        upcoming.append([last[node] for node in chains[t]])
        for node in chains[t]:
            last[node] = t
    upcoming.reverse()
    held: set[int] = set()
    heap: list[tuple[int, int, int]] = []
    hits = asked = hot_hits = hot_asked = 0
    for t, chain in enumerate(chains):
        found = 0
        while found < len(chain) - 1 and chain[found] in held:
            found += 1
        if len(chain) <= blocks:
            hits += found
            asked += len(chain)
            if trace.hot is not None and trace.hot[t]:
                hot_hits += min(found, trace.hot[t])
                hot_asked += trace.hot[t]
            held.update(chain)
            for depth, node in enumerate(chain):
                next_use[node] = upcoming[t][depth]
                heapq.heappush(heap, (-next_use[node], -depth, node))
            running, kept = set(chain), []
            while len(held) > blocks:
                entry = heapq.heappop(heap)
                node = entry[2]
                if node in running:
                    kept.append(entry)
                elif node in held and next_use[node] == -entry[0]:
                    held.remove(node)
            for entry in kept:
                heapq.heappush(heap, entry)
    return hits / asked, hot_hits / hot_asked if hot_asked else 0.0


def table(trace: Trace, shares: Sequence[float]) -> None:
    """Print one row for each size of the pool."""
    distinct = (
        len({request[: i + 1] for request in trace.requests for i in range(len(request))})
        if len(trace.requests) < 3000
        else len({block for request in trace.requests for block in request})
    )
    for share in shares:
        blocks = max(max(map(len, trace.requests)), int(distinct * share))
        rows: list[tuple[float, float]] = [hit_rates(trace, blocks, eviction) for eviction in Eviction]
        rows.append(optimum(trace, blocks))
        pick: Callable[[tuple[float, float]], float] = (lambda row: row[1]) if trace.hot else (lambda row: row[0])
        cells = " | ".join(f"{pick(row):.3f}" for row in rows)
        print(f"| {trace.name} | {blocks:,} ({share:.1%}) | {cells} |", flush=True)


def bookkeeping(*, memory: bool, total: int = 1_000_000, chain: int = 2048) -> None:
    """Print what a full pool of `total` blocks of 16 tokens costs: a match, an insertion with eviction, and if
    `memory`, its bytes. Counting them slows the rest down."""
    for index, eviction in product((IndexKind.HASH, IndexKind.RADIX), Eviction):
        rng = random.Random(3)
        if memory:
            tracemalloc.start()
        cache = PrefixCache(total, 16, index=index, eviction=eviction)
        prompts = [[rng.randrange(100_000) for _ in range(16 * chain)] for _ in range(4)]
        for i in range(total // chain + 8):
            tokens = list(prompts[i % 4])
            tokens[0] = i
            sequence = cache.open(tokens)
            cache.admit(sequence, len(tokens))
            cache.commit(sequence, len(tokens))
            cache.release(sequence)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        turns, matches = [], []
        for i in range(16):
            sequence = cache.open([total + i, *prompts[i % 4][1:]])
            start = time.process_time()
            cache.admit(sequence, 16 * chain)
            cache.commit(sequence, 16 * chain)
            cache.release(sequence)
            turns.append((time.process_time() - start) / chain * 1e6)
            again = cache.open([total + i, *prompts[i % 4][1:]])
            start = time.process_time()
            cache.admit(again, 16 * chain)
            matches.append((time.process_time() - start) * 1e3)
            cache.release(again)
        cells = [f"{used / total:.0f}" if memory else "-"]
        cells += [f"{median(spent):.2f}, {min(spent):.2f}" for spent in (matches, turns)]
        print(f"| {index} | {eviction} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with Mooncake's traces")
    parser.add_argument("--skip-bookkeeping", action="store_true", help="only hit rates")
    parser.add_argument("--memory", action="store_true", help="count the bookkeeping's bytes, which slows it down")
    parser.add_argument("--only", help="only traces whose name contains this")
    args = parser.parse_args()
    names = " | ".join([*Eviction, "optimum"])
    print(f"| trace | blocks (of the distinct ones) | {names} |\n|---|--:|" + "--:|" * (len(Eviction) + 1))
    traces = [in_turn(), flood(4), flood(16), agentic()]
    if args.traces:
        traces += [mooncake(path) for path in sorted(args.traces.glob("*_trace.jsonl*"))]
    for trace in traces:
        if args.only is None or args.only in trace.name:
            table(trace, SHARES.get(trace.name, HOT_SHARES if trace.hot else USUAL_SHARES))
    if not args.skip_bookkeeping:
        print("\nCPU: median and least of 16.\n\n| index | order | bytes a block | ms to match 32k tokens", end=" | ")
        print("us to insert and evict a block |\n|---|---|--:|--:|--:|")
        bookkeeping(memory=args.memory)


if __name__ == "__main__":
    main()
