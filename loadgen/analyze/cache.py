"""The hits of a cache of a given size: LRU over the runs of the trie, on one pod or on several."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.analyze.blocks import Sharing, share


class LruCache:
    """Evicts the least recently used blocks first, and a prompt's last blocks before its first ones.

    This is exact at block level: the blocks of a run are always used together, so a run loses its last blocks first.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity = capacity_blocks
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def use(self, path: Sequence[int], run_blocks: Sequence[int]) -> int:
        """Return how many blocks of the prompt were cached; then store the whole prompt, as far as it fits."""
        held = self._held
        hits = 0
        for run in path:
            there = held.get(run, 0)
            hits += there
            if there < run_blocks[run]:
                break
        for run in reversed(path):
            self._used += run_blocks[run] - held.get(run, 0)
            held[run] = run_blocks[run]
            held.move_to_end(run)
        if self._capacity is not None:
            self._evict(self._used - self._capacity)
        return hits

    def _evict(self, blocks: int) -> None:
        held = self._held
        while blocks > 0:
            run, there = next(iter(held.items()))
            gone = min(there, blocks)
            if gone == there:
                del held[run]
            else:
                held[run] = there - gone
            blocks -= gone
            self._used -= gone


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hit rates of `pods` caches of the same size."""

    cache_tokens: int | None
    one_pod: float
    """All requests go to one pod."""
    random_routing: float
    """Each request goes to a random pod, as behind a plain Service."""
    perfect_affinity: float
    """The pods share one memory: nothing is held twice, and each request finds what any pod has. An upper bound."""


class Simulation:
    """Caches of several sizes over the same prompts."""

    def __init__(self, sharing: Sharing, pods: int, seed: int) -> None:
        self._tokens = sharing.tokens.tolist()
        self._block_tokens = sharing.block_tokens
        self._paths = sharing.paths()
        self._run_blocks = sharing.run_blocks.tolist()
        rng = random.Random(f"{seed}/pods")
        self._pods = pods
        self._routes = [rng.randrange(pods) for _ in self._paths]

    def fleet(self, cache_tokens: int | None) -> Fleet:
        """Return the hit rates if each pod's cache holds `cache_tokens`; None: everything."""
        one = self._rate(cache_tokens, None)
        if self._pods == 1:
            return Fleet(cache_tokens, one, one, one)
        together = one if cache_tokens is None else self._rate(cache_tokens * self._pods, None)
        return Fleet(cache_tokens, one, self._rate(cache_tokens, self._routes), together)

    def _rate(self, cache_tokens: int | None, routes: Sequence[int] | None) -> float:
        capacity = None if cache_tokens is None else cache_tokens // self._block_tokens
        caches = [LruCache(capacity) for _ in range(self._pods if routes else 1)]
        hit = 0.0
        for number, path in enumerate(self._paths):
            blocks = caches[routes[number] if routes else 0].use(path, self._run_blocks)
            hit += min(blocks * self._block_tokens, self._tokens[number])
        return share(hit, sum(self._tokens))
