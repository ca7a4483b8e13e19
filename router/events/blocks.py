"""What one pod's events say about its blocks: number of copies, tiers, and which blocks are followed at all. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.events import Tier
from router.events.tree import BlockTree, Node, digests
from router.events.wire import Removed, Stored

_COPY_BITS = 20
_ONE = tuple(1 << _COPY_BITS * tier for tier in Tier)
_COUNT = (1 << _COPY_BITS) - 1


@dataclass(slots=True)
class BlockCounts:
    """Counts of one pod, since the start."""

    stored: int = 0
    removed: int = 0
    orphans: int = 0
    """Blocks whose beginning is not known, because they were stored before the stream was followed."""
    passed_over: int = 0
    """Blocks of groups of layers that are not followed. Only the first group with full attention is followed."""


class PodBlocks:
    """The blocks in the tree that a pod, or one data-parallel rank, has stored since it started.

    A pod may have several copies of a block; a removal removes one of them. Most blocks have one copy, on the GPU. Only
    other blocks have an entry in `_copies`.
    """

    def __init__(self, tree: BlockTree, bit: int, counts: BlockCounts) -> None:
        self.tree = tree
        self.bit = bit
        self._counts = counts
        self._copies: dict[Node, int] = {}
        self._inferred: set[Node] = set()
        """Blocks that the pod must hold, because a block behind them was stored. Their own event was not received."""
        self._full: dict[int, bool] = {}
        """Group of layers -> whether it has full attention and is followed."""

    def tier(self, node: Node) -> Tier:
        """Return the fastest tier that has the block, which the pod holds."""
        copies = self._copies.get(node)
        if copies is None or copies & _COUNT:
            return Tier.GPU
        return Tier.HOST if copies >> _COPY_BITS & _COUNT else Tier.DISK

    def store(self, event: Stored) -> Node | None:
        """Enter an event. Return its last block, or None if that is not known."""
        if not self.follows(event):
            self._counts.passed_over += len(event.hashes)
            return None
        self._counts.stored += len(event.hashes)
        if not event.tokens:
            self._moved(event)
            return None
        said = digests(event.tokens, len(event.hashes), event.extra)
        nodes = self.tree.path(event.parent, event.space, said, event.hashes)
        if nodes is None:
            self._counts.orphans += len(event.hashes)
            return None
        if event.tier is Tier.GPU:
            self._infer(nodes[0].parent)
        for node in nodes:
            self._add(node, event.tier)
        return nodes[-1]

    def remove(self, event: Removed) -> None:
        """Enter an event. Blocks that are not in the tree, and groups of which none is, are skipped: they were never
        counted."""
        if not self._full.get(event.group, False):
            return
        self._counts.removed += len(event.hashes)
        for name in event.hashes:
            node = self.tree.by_name.get(name)
            if node is not None and node.held & self.bit:
                self._drop(node, event.tier)

    def follows(self, event: Stored) -> bool:
        """Return whether the event's group is followed. Of several groups with full attention, only the first is
        followed, because all hold the same tokens."""
        if event.group not in self._full:
            self._full[event.group] = event.is_full_attention and not any(self._full.values())
        return self._full[event.group]

    def _moved(self, event: Stored) -> None:
        """Enter blocks that a slower tier has now. The event gives their names on the GPU, without tokens."""
        for name in event.hashes:
            node = self.tree.by_name.get(name)
            if node is None:
                self._counts.orphans += 1
            else:
                self._add(node, event.tier)

    def _infer(self, node: Node | None) -> None:
        """Note that all blocks before a stored one are there too, though their events may have been missed."""
        while node is not None and not node.held & self.bit:
            self.tree.hold(node, self.bit)
            self._inferred.add(node)
            node = node.parent

    def _add(self, node: Node, tier: Tier) -> None:
        bit = self.bit
        if not node.held & bit:
            if tier is not Tier.GPU:
                self._copies[node] = _ONE[tier]
            self.tree.hold(node, bit)
            return
        if node in self._inferred and tier is Tier.GPU:
            self._inferred.discard(node)  # this is the copy that was inferred
            return
        before = self.tier(node)
        self._copies[node] = self._copies.get(node, 1) + _ONE[tier]
        self._retold(node, before)

    def _drop(self, node: Node, tier: Tier) -> None:
        copies = self._copies.get(node, 1)
        if not copies >> _COPY_BITS * tier & _COUNT:
            return  # an unknown copy
        before = self.tier(node)
        copies -= _ONE[tier]
        if copies and copies != 1:
            self._copies[node] = copies
        else:
            self._copies.pop(node, None)
        if not copies:
            self._inferred.discard(node)
            self.tree.release(node, self.bit)
        else:
            self._retold(node, before)

    def _retold(self, node: Node, before: Tier) -> None:
        if self.tier(node) is not before:
            self.tree.retell(node, self.bit)
