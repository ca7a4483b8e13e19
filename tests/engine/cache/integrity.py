"""Checks the cache's invariants in full (engine/cache/README.md lists them)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.cache.block_pool import BlockPool
from engine.cache.indexed import NO_BLOCK, IndexedBlocks
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence


def check_integrity(cache: PrefixCache) -> None:
    """Raise AssertionError naming the first invariant that does not hold. Visits everything."""
    pool, indexed, users, keys = cache.pool, cache._indexed, list(cache._users), cache._keys
    pins: tuple[Iterable[int], ...] = (cache.pins, cache.learnt)
    pinned = [list(kind) for kind in pins]
    _check_blocks(pool, indexed, users, [block for kind in pinned for block in kind])
    for kind in pinned:
        _check_pins(indexed, kind)
    _check_chains(indexed)
    _check_eviction_order(pool, indexed)
    for sequence in users:
        _check_table(sequence, indexed, is_current=sequence.generation == cache._generation)
    anchored = Counter(key for found in indexed.keys for key in found)
    _require(anchored == keys.counts(), "held keys are those anchored at indexed blocks")
    cache._index.check()


def _check_pins(indexed: IndexedBlocks, pinned: Sequence[int]) -> None:
    for block in pinned:
        _require(indexed.digests[block] is not None, f"block {block}: a pinned block is indexed")
        _require(indexed.parents[block] in (NO_BLOCK, *pinned), f"block {block}: a pinned block's parent is pinned")


def _check_blocks(
    pool: BlockPool, indexed: IndexedBlocks, users: Sequence[CachedSequence], pinned: Sequence[int]
) -> None:
    references = Counter(block for sequence in users for block in sequence.blocks)
    references.update(pinned)
    for sequence in users:
        references.update(node for node, block in zip(sequence.nodes, sequence.blocks, strict=False) if node != block)
    references.update(sequence.source for sequence in users if sequence.source is not None)
    for block in range(pool.total):
        _require(pool.references(block) == references[block], f"block {block}: references equal uses")
    free, idle = pool.free_blocks(), pool.idle_blocks()
    used = [block for block in range(pool.total) if references[block]]
    _require(sorted([*free, *idle, *used]) == list(range(pool.total)), "a block is either free, idle or used")
    _require(all(indexed.digests[block] is None for block in free), "free blocks are not indexed")
    _require(all(indexed.digests[block] is not None for block in idle), "idle blocks are indexed")


def _check_chains(indexed: IndexedBlocks) -> None:
    for block in _blocks(indexed):
        parent = indexed.parents[block]
        depth = 0 if parent == NO_BLOCK else indexed.depths[parent] + 1
        _require(indexed.depths[block] == depth, f"block {block}: it is one deeper than its parent")
        if parent != NO_BLOCK:
            _require(bool(indexed.digests[parent]), f"block {block}: its parent is indexed, and full")
            is_followed = bool(indexed.is_followed[parent]) or not indexed.digests[block]
            _require(is_followed, f"block {block}: its parent is known to be followed")


def _check_eviction_order(pool: BlockPool, indexed: IndexedBlocks) -> None:
    turn = {block: i for i, block in enumerate(pool.idle_blocks())}
    for block in _blocks(indexed):
        parent = indexed.parents[block]
        if parent not in turn:
            continue
        _require(block in turn, f"block {block}: an idle block's children are idle")
        _require(turn[block] < turn[parent], f"block {block}: evicted before its parent")


def _check_table(sequence: CachedSequence, indexed: IndexedBlocks, *, is_current: bool) -> None:
    _require(len(set(sequence.blocks)) == len(sequence.blocks), "a sequence uses a block once")
    parent = NO_BLOCK
    for i, node in enumerate(sequence.nodes):
        is_indexed = indexed.digests[node] is not None
        _require(is_indexed == is_current, "the nodes of a sequence are indexed until the cache is reset")
        same = indexed.parents[node] == parent and indexed.digests[node] == sequence.digests[i]
        _require(same or not is_indexed, "a sequence's nodes are its own chain")
        parent = node
    for i, block in enumerate(sequence.blocks):
        is_node = i < len(sequence.nodes) and sequence.nodes[i] == block
        is_tail = i == len(sequence.nodes) and indexed.digests[block] == b""
        _require(
            indexed.digests[block] is None or is_node or is_tail,
            f"block {block}: an indexed block in a table is a node of that table's chain, or its end",
        )


def _blocks(indexed: IndexedBlocks) -> list[int]:
    return [block for block, digest in enumerate(indexed.digests) if digest is not None]


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"cache invariant violated: {invariant}")
