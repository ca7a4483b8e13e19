"""An overview of a cache for operators: its shape, its hottest prefixes, how its blocks are used.

A pool may have a million blocks, which take a second to visit. So another thread may make the survey while the cache is
used. The survey changes nothing, and its counts are off by what changes meanwhile. Tokens are never shown: a prefix is
shown by its length and its digest.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from typing import Any, Protocol

from engine.cache.indexed import NO_BLOCK, IndexedBlocks

MOST_PREFIXES = 100
"""The most prefixes that a survey names."""


class Pool(Protocol):
    """The part of `BlockPool` that a survey reads."""

    total: int

    def references(self, block: int) -> int:
        """Number of references to the block."""
        ...

    def uses(self, block: int) -> int:
        """Number of requests that shared the block's content; 255 stands for 255 or more."""
        ...


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning that prompts share."""

    digest: str
    """First 16 hexadecimal digits of its last block's digest, which is made of its tokens and its cache_salt."""
    tokens: int
    uses: int
    """Number of requests that shared it; 255 stands for 255 or more."""
    running: int
    """Number of requests that hold it now."""


@dataclass(slots=True)
class Blocks:
    """The pool's blocks, each in one of these counts."""

    used: int = 0
    """Used by requests, and not reusable by others: unfinished answers, prompts not computed yet, duplicates."""
    used_cached: int = 0
    """Used by requests, and cached."""
    idle: int = 0
    """Cached, and used by no request: evicted when room is needed."""
    free: int = 0


@dataclass(slots=True)
class _Tree:
    chains: int = 0
    """Blocks that begin a prompt."""
    leaves: int = 0
    """Cached blocks that no cached block follows."""
    branches: int = 0
    """Cached blocks that two or more cached blocks follow."""
    deepest_tokens: int = 0
    blocks_by_tokens: Counter[int] = field(default_factory=Counter)
    """Number of cached blocks by the depth of their last token, rounded up to a power of two."""


class Survey:
    """A survey of one cache at one moment. Any thread may take the `result`, once."""

    def __init__(self, pool: Pool, indexed: IndexedBlocks, stored: Sequence[int], block_size: int, steps: int) -> None:
        """`stored`: by block, the step in which it was cached; `steps`: number of steps begun until now."""
        self._pool, self._indexed, self._stored = pool, indexed, stored
        self._block_size, self._steps = block_size, steps
        self._blocks = Blocks()
        self._children = array("i", bytes(4 * pool.total))
        self._child_uses = bytearray(pool.total)
        """By block: the most uses of any block that directly follows it."""
        self._free_runs = self._longest_run = self._run = 0
        self._ages: Counter[int] = Counter()
        """Number of cached blocks by the bit length of their age in steps."""

    def result(self, most: int) -> dict[str, Any]:
        """Return the survey, ready for JSON, with the `most` hottest prefixes, MOST_PREFIXES at most.

        Visits every block.
        """
        for block in range(self._pool.total):
            self._visit(block)
        tree, hot = self._tree(most)
        return {
            "block_size": self._block_size,
            "blocks": asdict(self._blocks),
            "free_runs": {"runs": self._free_runs, "longest_blocks": self._longest_run},
            "tree": {
                **asdict(tree),
                "blocks_by_tokens": {str(n): count for n, count in sorted(tree.blocks_by_tokens.items())},
            },
            "age_steps": {f"<{2**bits}": count for bits, count in sorted(self._ages.items())},
            "hottest": [asdict(prefix) for prefix in hot],
        }

    def _visit(self, block: int) -> None:
        is_cached, references = self._indexed.digests[block] is not None, self._pool.references(block)
        blocks = self._blocks
        if not is_cached and not references:
            blocks.free += 1
            self._run += 1
            self._free_runs += self._run == 1
            self._longest_run = max(self._longest_run, self._run)
            return
        self._run = 0
        if not is_cached:
            blocks.used += 1
            return
        if references:
            blocks.used_cached += 1
        else:
            blocks.idle += 1
        self._ages[max(0, self._steps - self._stored[block]).bit_length()] += 1
        parent = self._indexed.parents[block]
        if parent != NO_BLOCK:
            self._children[parent] += 1
            self._child_uses[parent] = max(self._child_uses[parent], self._pool.uses(block))

    def _tree(self, most: int) -> tuple[_Tree, list[HotPrefix]]:
        tree, size, depths = _Tree(), self._block_size, self._indexed.depths
        hot: list[tuple[int, int, int]] = []
        for block, digest in enumerate(self._indexed.digests):
            if digest is None:
                continue
            tokens, children, uses = (depths[block] + 1) * size, self._children[block], self._pool.uses(block)
            tree.chains += self._indexed.parents[block] == NO_BLOCK
            tree.leaves += children == 0
            tree.branches += children > 1
            tree.deepest_tokens = max(tree.deepest_tokens, tokens)
            tree.blocks_by_tokens[1 << (tokens - 1).bit_length()] += 1
            if digest and uses > 1 and self._child_uses[block] < uses:  # otherwise a longer prefix is as hot
                hot.append((uses, tokens, block))
        return tree, [self._hot(*one) for one in nlargest(min(most, MOST_PREFIXES), hot)]

    def _hot(self, uses: int, tokens: int, block: int) -> HotPrefix:
        digest = self._indexed.digests[block] or b""
        return HotPrefix(digest.hex()[:16], tokens, uses, self._pool.references(block))
