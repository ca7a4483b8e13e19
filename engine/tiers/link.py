"""Two neighbouring tiers: the index of each, and the copies between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from engine.cache.prefix_cache import MAX_KEYS_PER_BLOCK, PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.load import StepCost
from engine.contract.prefix_key import PrefixKey
from engine.tiers.copies.base import BlockPair, Direction, FinishedCopy
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.block_file import NO_DIGEST, Label
from engine.tiers.stores.place import Place

MIN_QUEUE_BLOCKS = 16
PAUSE_S = 5.0
"""Seconds without copies downwards after one has failed."""
QUEUE_SHARE = 1 / 4
"""Largest share of the upper tier's blocks that may be on their way down: these blocks cannot be freed meanwhile."""


class Link:
    """Copies blocks between `upper` and `lower`. The caller of a copy keeps its source and its target referenced."""

    def __init__(
        self,
        tier: Place,
        upper: PrefixCache,
        lower: PrefixCache,
        copier: BlockCopier,
        block_bytes: int,
        describe: Callable[[int, Label], None] | None = None,
        beside: float = 0.0,
        forget: Callable[[], None] | None = None,
    ) -> None:
        """`tier`: what `lower` is; `copier`: demotes from `upper`'s blocks to those of `lower`; `describe`: called with
        what a block of `lower` will hold, before it is copied; `beside`: how much longer steps take beside a copy, as a
        fraction of the time of the copy; `forget`: called with each reset, must not wait."""
        self._describe = describe
        self._forget = forget
        self._beside = beside
        self.tier = tier
        self.upper = upper
        self.lower = lower
        self.copier = copier
        self.block_bytes = block_bytes
        self.spoilt: set[int] = set()
        """Blocks of `lower` that cannot be read, though they are indexed; rewritten when a request brings them."""
        self.paused_until_s = -math.inf
        """Nothing goes down before this time: the last copy failed, and the cause (a full disk) usually persists."""
        self.unasked = 0
        """Number of blocks on their way down whose copy has not begun."""
        self._then: dict[int, Callable[[FinishedCopy], None]] = {}

    def reset(self) -> None:
        """Forget what `lower` holds."""
        self.lower.reset()
        self.spoilt.clear()
        if self._forget is not None:
            self._forget()

    @property
    def is_busy(self) -> bool:
        """Whether any copy has not ended."""
        return bool(self._then)

    def copy(self, direction: Direction, pairs: Sequence[BlockPair], then: Callable[[FinishedCopy], None]) -> int:
        """Begin to copy and return the copy's id. `end` calls `then` when the copy has ended."""
        ask = self.copier.demote if direction is Direction.DEMOTE else self.copier.promote
        copy_id = ask(pairs)
        self._then[copy_id] = then
        return copy_id

    def cancel(self, copy_id: int) -> None:
        """Begin no further part of the copy, if it has not ended."""
        if copy_id in self._then:
            self.copier.cancel(copy_id)

    def cancel_demotions(self) -> None:
        """Begin no further part of any copy downwards."""
        self.copier.cancel_all(Direction.DEMOTE)

    def poll(self) -> Sequence[FinishedCopy]:
        """Begin the copies that may begin now, and return those that have ended. The caller calls `end` for each."""
        return self.copier.poll()

    def end(self, copy: FinishedCopy) -> None:
        """Call the function that waits for this copy, which has ended."""
        self._then.pop(copy.copy_id)(copy)

    def beside_s(self, direction: Direction) -> float:
        """Return by how many seconds the copy of a block delays the steps beside it; 0 while the rate is not known."""
        rate = self.copier.bytes_per_s(direction) if self._beside else None
        return self._beside * self.block_bytes / rate if rate else 0.0

    def readable_blocks(self, sequence: CachedSequence, tokens: int) -> tuple[int, bool]:
        """Return how many leading blocks of the sequence `lower` holds, within `tokens` tokens, and whether a spoilt
        one follows them. If one does, no later block can come up over this link, not even from a deeper tier."""
        nodes = self.lower.find(sequence, tokens // self.lower.block_size)
        if self.spoilt:
            for i, node in enumerate(nodes):
                if node in self.spoilt:
                    return i, True
        return len(nodes), False

    def holds(self, sequence: CachedSequence, block: int) -> bool:
        """Whether `lower` holds the sequence's block of this index, and so all blocks before it. Cheap."""
        return self.lower.has(sequence.digests[block])

    def has_room(self, now_s: float) -> bool:
        """Whether a sequence may go down now. It goes as a whole, because all its blocks are held until its last copy
        ends."""
        if now_s < self.paused_until_s:
            return False
        most = max(MIN_QUEUE_BLOCKS, int(self.upper.pool.total * QUEUE_SHARE))
        return self.copier.open_blocks(Direction.DEMOTE) + self.unasked < most

    def worthwhile(self, sequence: CachedSequence, cost: StepCost) -> int:
        """Return how many leading blocks are worth copying down. These are all blocks if computing the last one again
        takes longer than copying it in the slower direction, else those up to the last block used more than once.
        While a rate or the cost is not known, all blocks are worth it."""
        size, nodes = self.upper.block_size, sequence.nodes
        down, up = (self.copier.bytes_per_s(direction) for direction in Direction)
        if down is None or up is None or not cost.token_s:
            return len(nodes)
        copy_s = self.block_bytes / min(down, up)
        last = len(nodes) - 1
        # Later blocks cost more to compute (the formula of `StepCost`), so the last one decides.
        if size * (cost.token_s + cost.attention_s * (last + 0.5) * size) > copy_s:
            return len(nodes)
        uses = self.upper.pool.uses
        return next((i + 1 for i in range(last, -1, -1) if uses(nodes[i]) > 1), 0)

    def describe(self, sequence: CachedSequence, start: int, stop: int) -> None:
        """Note that the sequence's blocks `start` .. `stop - 1` in `lower` will be filled with its tokens' KV."""
        if self._describe is not None:
            for target, label in zip(sequence.blocks[start:stop], labels(sequence, start), strict=False):
                self._describe(target, label)

    def learn(self, sequence: CachedSequence, first: int, stop: int) -> None:
        """Index the sequence's blocks `first` .. `stop - 1`, which `lower` holds without a copy from here."""
        part = sequence.fork()
        present = self.lower.hold(part, stop, counts_use=False)
        if present is None:
            return
        self.describe(part, present, stop)
        self.lower.commit(part, stop * self.lower.block_size)
        self.spoilt.difference_update(part.nodes[first:stop])
        self.lower.release(part)

    def repairs(self, upper: CachedSequence, lower: CachedSequence) -> list[BlockPair]:
        """Return the pairs to copy again: blocks of the sequence in `lower` that are spoilt and that no copy uses."""
        if not self.spoilt:
            return []
        is_idle = self.copier.fences.is_slot_idle
        there = list(zip(upper.nodes, lower.blocks[: len(lower.nodes)], strict=False))
        wanted = [i for i, (_, target) in enumerate(there) if target in self.spoilt and is_idle(target)]
        if any(not self.describe_all(lower, i, i + 1) for i in wanted):
            return []
        return [BlockPair(*there[i]) for i in wanted]

    def pairs(self, upper: CachedSequence, lower: CachedSequence, start: int, stop: int) -> list[BlockPair]:
        """Return a pair of source and target for each of the sequence's blocks `start` .. `stop - 1`."""
        return [BlockPair(a, b) for a, b in zip(upper.nodes[start:stop], lower.blocks[start:stop], strict=True)]

    def describe_all(self, lower: CachedSequence, start: int, stop: int) -> bool:
        """Like `describe`; return False, with nothing described, if a label does not fit (1,000 tokens a block)."""
        if self._describe is None:
            return True
        found = list(islice(labels(lower, start), stop - start))
        if not all(label.fits for label in found):
            return False
        for target, label in zip(lower.blocks[start:stop], found, strict=True):
            self._describe(target, label)
        return True


def labels(sequence: CachedSequence, start: int = 0) -> Iterator[Label]:
    """Iterate over the labels of the sequence's blocks, from block `start` on."""
    keys: dict[int, list[PrefixKey]] = {}
    for i, key in sequence.anchors:
        if i >= start:
            keys.setdefault(i, []).append(key)
    parent = sequence.digests[start - 1] if start else NO_DIGEST
    for i in range(start, len(sequence.digests)):
        digest = sequence.digests[i]
        yield Label(digest, parent, sequence.contents[i], tuple(keys.get(i, ())[:MAX_KEYS_PER_BLOCK]))
        parent = digest


def leading(pairs: Sequence[BlockPair], end: FinishedCopy) -> int:
    """Return how many of the pairs asked for have arrived, counted from the first up to the first gap."""
    if not end.dropped:
        return len(pairs)
    done = set(end.done)
    return next((i for i, pair in enumerate(pairs) if pair not in done), len(pairs))
