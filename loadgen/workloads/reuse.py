"""What one prefix cache would reuse of a trace: the check that an importer reads its file rightly."""

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
    """Of a single LRU cache that all prompts go through in turn. `capacity_tokens` None: it forgets nothing.

    `prompts`: block ids and input tokens of each, as `Trace.prompts` has them. Only the leading blocks that are all
    cached count. A block is one under its prefix, so ids need not be chained; a prompt's first block is used last,
    so that what is evicted is never the beginning of what stays.
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
        before = hash((before, block))  # of integers: the same in every process
        chain.append(before)
    return chain
