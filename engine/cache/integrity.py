"""The cache's invariants, checked in full (README.md lists them)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine.cache.block_pool import BlockPool
from engine.cache.hashing import chain_digest, root_digest
from engine.cache.held_keys import HeldKeys
from engine.cache.sequence import CachedSequence, Node


def check(
    pool: BlockPool,
    index: Mapping[bytes, Node],
    node_of: Sequence[Node | None],
    users: Iterable[CachedSequence],
    keys: HeldKeys,
    block_size: int,
) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    _check_blocks(pool, node_of, list(users))
    _check_index(index, node_of, 4 * block_size)
    _check_eviction_order(pool, index)
    for sequence in users:
        _check_table(sequence, node_of)
    anchored = Counter(key for node in index.values() for key in node.keys)
    _require(anchored == keys.counts(), "held keys are those anchored at indexed blocks")


def _check_blocks(pool: BlockPool, node_of: Sequence[Node | None], users: Sequence[CachedSequence]) -> None:
    references = Counter(block for sequence in users for block in sequence.blocks)
    for sequence in users:
        references.update(
            node.block for node, block in zip(sequence.nodes, sequence.blocks, strict=False) if node.block != block
        )
    for block in range(pool.total):
        _require(pool.references(block) == references[block], f"block {block}: references equal uses")
    free, idle = pool.free_blocks(), pool.idle_blocks()
    used = [block for block in range(pool.total) if references[block]]
    _require(sorted([*free, *idle, *used]) == list(range(pool.total)), "a block is free, idle or used: one of these")
    _require(all(node_of[block] is None for block in free), "free blocks are not indexed")
    _require(all(node_of[block] is not None for block in idle), "idle blocks are indexed")


def _check_index(index: Mapping[bytes, Node], node_of: Sequence[Node | None], token_width: int) -> None:
    _require(len(index) == sum(node is not None for node in node_of), "index and blocks know the same nodes")
    for digest, node in index.items():
        _require(node.digest == digest and node_of[node.block] is node, f"block {node.block}: one node, one digest")
        salt, tokens = node.content[:-token_width], node.content[-token_width:]
        if node.parent is not None:
            _require(index.get(node.parent.digest) is node.parent, f"block {node.block}: its parent is indexed")
        parent = node.parent.digest if node.parent else root_digest(salt)
        _require(digest == chain_digest(parent, tokens), f"block {node.block}: digest of its content")


def _check_eviction_order(pool: BlockPool, index: Mapping[bytes, Node]) -> None:
    turn = {block: i for i, block in enumerate(pool.idle_blocks())}
    for node in index.values():
        if node.parent is None or node.parent.block not in turn:
            continue
        _require(node.block in turn, f"block {node.block}: an idle block's children are idle")
        _require(turn[node.block] < turn[node.parent.block], f"block {node.block}: evicted before its parent")


def _check_table(sequence: CachedSequence, node_of: Sequence[Node | None]) -> None:
    _require(len(set(sequence.blocks)) == len(sequence.blocks), "a sequence uses a block once")
    parent = None
    for i, node in enumerate(sequence.nodes):
        _require(node.parent is parent and node.content == sequence.contents[i], "a sequence's nodes are its own chain")
        parent = node
    for i, block in enumerate(sequence.blocks):
        node_at = node_of[block]
        _require(
            node_at is None or (i < len(sequence.nodes) and sequence.nodes[i] is node_at),
            f"block {block}: an indexed block in a table is a node of that table's chain",
        )


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"cache invariant violated: {invariant}")
