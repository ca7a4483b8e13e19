"""Two neighbouring tiers: the index of each, and the copies between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from engine.backend.tiers.base import BlockPair, Direction, FinishedCopy
from engine.backend.tiers.copier import BlockCopier
from engine.cache.prefix_cache import MAX_KEYS_PER_BLOCK, PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.load import StepCost
from engine.contract.prefix_key import PrefixKey
from engine.tiers.block_file import NO_DIGEST, Label
from engine.tiers.place import Place

MIN_QUEUE_BLOCKS = 16
PAUSE_S = 5.0
"""After a copy downwards has failed."""
QUEUE_SHARE = 1 / 4
"""Of the upper tier's blocks: with as many on their way down no more are asked to go. They are not free meanwhile."""


class Link:
    """Copies blocks between `upper` and `lower`. Whoever asks for a copy keeps its source and its target referenced."""

    def __init__(
        self,
        tier: Place,
        upper: PrefixCache,
        lower: PrefixCache,
        copier: BlockCopier,
        block_bytes: int,
        describe: Callable[[int, Label], None] | None = None,
    ) -> None:
        """`tier`: what `lower` is; `copier`: demotes from `upper`'s blocks to those of `lower`; `describe`: takes what
        a block of `lower` is going to hold, before it is copied."""
        self._describe = describe
        self.tier = tier
        self.upper = upper
        self.lower = lower
        self.copier = copier
        self.block_bytes = block_bytes
        self.spoilt: set[int] = set()
        """Blocks of `lower` that cannot be read, though they are indexed: written again when they come by."""
        self.paused_until_s = -math.inf
        """Nothing goes down before: the last copy failed, and what failed once (a full disk) mostly fails again."""
        self._then: dict[int, Callable[[FinishedCopy], None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a copy has not ended."""
        return bool(self._then)

    def copy(self, direction: Direction, pairs: Sequence[BlockPair], then: Callable[[FinishedCopy], None]) -> int:
        """Begin to copy; `then` is called by `poll`. The copy's id."""
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

    def poll(self) -> list[FinishedCopy]:
        """Call what waits for the copies that have ended; these copies."""
        finished = self.copier.poll()
        for end in finished:
            self._then.pop(end.copy_id)(end)
        return finished

    def readable_blocks(self, sequence: CachedSequence, tokens: int) -> tuple[int, bool]:
        """Leading blocks of the sequence, of `tokens` tokens at most, that `lower` holds; and whether a spoilt one ends
        them: then nothing behind it can come this way either."""
        nodes = self.lower.find(sequence, tokens // self.lower.block_size)
        if self.spoilt:
            for i, node in enumerate(nodes):
                if node in self.spoilt:
                    return i, True
        return len(nodes), False

    def holds(self, sequence: CachedSequence, block: int) -> bool:
        """Whether `lower` holds the sequence's block of this index, and so all before it. Cheap."""
        return self.lower.has(sequence.digests[block])

    def has_room(self, now_s: float) -> bool:
        """Whether a sequence may be asked to go down now: all of it, as all of it is held meanwhile."""
        if now_s < self.paused_until_s:
            return False
        most = max(MIN_QUEUE_BLOCKS, int(self.upper.pool.total * QUEUE_SHARE))
        return self.copier.open_blocks(Direction.DEMOTE) < most

    def worthwhile(self, sequence: CachedSequence, cost: StepCost) -> int:
        """Leading blocks worth copying down: up to the last one that was used twice, or that takes longer to compute
        again than to copy, either way. While a rate or the cost is not known, all of them."""
        size, nodes = self.upper.block_size, sequence.nodes
        down, up = (self.copier.bytes_per_s(direction) for direction in Direction)
        if down is None or up is None or not cost.token_s:
            return len(nodes)
        copy_s = self.block_bytes / min(down, up)
        last = len(nodes) - 1
        # Later blocks are dearer (the formula of `StepCost`), so the last one decides.
        if size * (cost.token_s + cost.attention_s * (last + 0.5) * size) > copy_s:
            return len(nodes)
        uses = self.upper.pool.uses
        return next((i + 1 for i in range(last, -1, -1) if uses(nodes[i]) > 1), 0)

    def describe(self, sequence: CachedSequence, start: int, stop: int) -> None:
        """The sequence's blocks `start` .. `stop - 1` in `lower` are going to be filled with what it says."""
        if self._describe is not None:
            for target, label in zip(sequence.blocks[start:stop], labels(sequence, start), strict=False):
                self._describe(target, label)

    def learn(self, sequence: CachedSequence, first: int, stop: int) -> None:
        """`lower` holds the sequence's blocks `first` .. `stop - 1`, though not by a copy from here."""
        part = sequence.fork()
        present = self.lower.hold(part, stop, counts_use=False)
        if present is None:
            return
        self.describe(part, present, stop)
        self.lower.commit(part, stop * self.lower.block_size)
        self.spoilt.difference_update(part.nodes[first:stop])
        self.lower.release(part)

    def pairs_down(
        self, upper: CachedSequence, lower: CachedSequence, present: int
    ) -> tuple[list[BlockPair], list[BlockPair]]:
        """What is spoilt below and in nobody's use, and what is missing there behind the `present` blocks; nothing of
        either where a block cannot be described."""
        pairs = [BlockPair(source, target) for source, target in zip(upper.nodes, lower.blocks, strict=False)]
        is_idle = self.copier.fences.is_slot_idle
        repairs = [pair for pair in pairs[:present] if pair.target in self.spoilt and is_idle(pair.target)]
        if self._describe is not None:
            written = {pair.target for pair in (*repairs, *pairs[present:])}
            for target, label in zip(lower.blocks, labels(lower), strict=False):
                if not label.fits:  # a block of a thousand tokens
                    return [], []
                if target in written:
                    self._describe(target, label)
        return repairs, pairs[present:]


def labels(sequence: CachedSequence, start: int = 0) -> Iterator[Label]:
    """What each block of the sequence holds, from block `start` on."""
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
    """How many of the first pairs asked for have arrived without a gap."""
    if not end.dropped:
        return len(pairs)
    done = set(end.done)
    return next((i for i, pair in enumerate(pairs) if pair not in done), len(pairs))
