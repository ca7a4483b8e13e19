"""How much of a trace one prefix cache would reuse: a check that an importer reads its file correctly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HitRate:
    """Shares of all prompts' tokens and blocks."""

    tokens: float
    blocks: float


def lru_hit_rate(
    prompts: Iterable[tuple[Sequence[int], int]], block_tokens: int, capacity_tokens: int | None
) -> HitRate:
    """Return the rate of a single LRU cache that all prompts use in turn. `capacity_tokens` None: it forgets nothing.

    `prompts`: block ids and input tokens of each, as from `Trace.prompts`. A prompt's hits are its leading blocks up to
    the first one that is not cached. A block is identified by its own id and all ids before it, so ids need not be
    chained. A prompt's first block is used last, so that eviction never removes the beginning of what stays.
    """
    capacity = None if capacity_tokens is None else capacity_tokens // block_tokens
    cached: OrderedDict[int, None] = OrderedDict()
    hit_blocks = hit_tokens = blocks = tokens = 0
    for ids, input_tokens in prompts:
        chain = _chained(ids)
        found = 0
        while found < len(chain) and chain[found] in cached:
            found += 1
        hit_blocks += found
        hit_tokens += min(found * block_tokens, input_tokens)
        blocks += len(chain)
        tokens += input_tokens
        for block in reversed(chain):
            cached[block] = None
            cached.move_to_end(block)
        while capacity is not None and len(cached) > capacity:
            cached.popitem(last=False)
    return HitRate(hit_tokens / max(1, tokens), hit_blocks / max(1, blocks))


def _chained(ids: Sequence[int]) -> list[int]:
    chain: list[int] = []
    before = 0
    for block in ids:
        before = hash((before, block))  # hashes of integers are the same in every process
        chain.append(before)
    return chain
