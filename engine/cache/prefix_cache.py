"""One pool of KV blocks with reuse of equal prefixes. See README.md for the invariants."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from engine.cache.block_pool import BlockPool
from engine.cache.changes import KeyChanges
from engine.cache.eviction import MOST_DEPTH_COST, Eviction, GreedyDual
from engine.cache.ghosts import EvictedLately
from engine.cache.hash_index import HashIndex
from engine.cache.held_keys import HeldKeys, Span, anchors
from engine.cache.index import IndexKind, Match, NoIndex, PrefixIndex
from engine.cache.indexed import IndexedBlocks
from engine.cache.integrity import check
from engine.cache.pins import Pins
from engine.cache.radix_index import RadixIndex
from engine.cache.sequence import CachedSequence
from engine.cache.survey import Survey
from engine.contract.events import Keys

MAX_KEYS_PER_BLOCK = 32
"""A block with as many keys takes no more: they go to the next block of their chain.

A popular block would otherwise collect a key from every request that goes its own way soon after it.
"""


class PrefixCache:
    """KV blocks of requests, indexed by content once computed. How equal beginnings are found is `PrefixIndex`'s.

    Use: `open` a sequence, `admit` it, `extend` it before a step that needs more room, `commit` after the step,
    `release`. Steps are bracketed by `begin_step` and `end_step`, and end in the order in which they began; what is
    released comes free when every step begun before that has ended.
    """

    def __init__(
        self,
        blocks_total: int,
        block_size: int,
        *,
        index: IndexKind = IndexKind.HASH,
        eviction: Eviction = Eviction.LRU,
        pinned_blocks: int = 0,
        learnt_blocks: int = 0,
    ) -> None:
        """`pinned_blocks`: that may be pinned at a time because clients ask; `learnt_blocks`: unasked."""
        if blocks_total < 1 or block_size < 1:
            raise ValueError(f"blocks_total and block_size must be at least 1, got {blocks_total} and {block_size}")
        self.block_size = block_size
        self.enabled = index is not IndexKind.OFF
        """Whether anything is ever reused."""
        self._indexed = IndexedBlocks(blocks_total)
        self._index: PrefixIndex
        match index:
            case IndexKind.HASH:
                self._index = HashIndex(self._indexed, block_size)
            case IndexKind.RADIX:
                self._index = RadixIndex(self._indexed, block_size, self._supersede)
            case IndexKind.OFF:
                self._index = NoIndex()
        self._worth: GreedyDual | None = None
        if eviction is not Eviction.LRU:
            self._worth = GreedyDual(self._indexed.parents, self._indexed.depths)
        self._weighs_depth = eviction is Eviction.COST
        self.pool = BlockPool(blocks_total, self._worth)
        self.pins = Pins(self.pool, self._indexed, pinned_blocks)
        """What clients ask to keep. Every use renews it."""
        self.learnt = Pins(self.pool, self._indexed, learnt_blocks, are_guesses=True)
        """What is likely to be asked for soon. No use renews it, and it is given up before a request has to wait."""
        self._now_s = 0.0
        self._keys = HeldKeys()
        self._users: set[CachedSequence] = set()
        self._steps_begun = self._steps_ended = 0
        self._fenced: deque[tuple[int, CachedSequence]] = deque()
        """Released sequences, each with the number of the last step begun before."""
        self._generation = 0
        self.evictions = 0
        """Indexed blocks that had to hold something else, since the start."""
        self.evicted_too_soon = 0
        """Of these, blocks asked for again before about four pools of others were evicted."""
        self._evicted = EvictedLately(blocks_total)
        self._stored = array("q", bytes(8 * blocks_total))
        """By block: the steps begun when it was indexed."""

    def advance(self, now_s: float) -> None:
        """It is so late, in seconds of any clock that only goes forward: pins whose time is over end."""
        self._now_s = now_s
        self.pins.expire(now_s)
        self.learnt.expire(now_s)

    def keep(self, sequence: CachedSequence, blocks: int, lifetime_s: float, *, is_asked: bool = True) -> int:
        """Pin the sequence's first `blocks` blocks, as far as they are indexed; returns how many of them are pinned."""
        if sequence.generation != self._generation:
            return 0
        pins = self.pins if is_asked else self.learnt
        return pins.keep(sequence.nodes[:blocks], lifetime_s, self._now_s, sequence.salt)

    def lacks(self, sequence: CachedSequence, known_tokens: int, reserve_blocks: int = 0) -> int:
        """Blocks that must become available before `admit` would give the sequence its own; 0: it would now."""
        nodes = self._index.match(sequence, known_tokens - 1).nodes
        reused = sum([self.pool.references(node) > 0 for node in nodes])
        return max(0, self.blocks_for(known_tokens) - reused + reserve_blocks - self.pool.available)

    def branches_off(self, sequence: CachedSequence) -> int:
        """Requests to which the last block was common that this sequence reuses, where another went on behind that
        block; 0: none did."""
        if not sequence.nodes or not self._indexed.is_followed[sequence.nodes[-1]]:
            return 0
        return self.pool.uses(sequence.nodes[-1])

    def learn_cost(self, token_s: float, attention_s: float) -> None:
        """What a token takes to compute: seconds, and seconds more for each token before it.

        0, 0: not known yet. Only eviction by cost heeds it.
        """
        if self._worth is not None and self._weighs_depth and token_s > 0:
            self._worth.depth_cost = min(attention_s / token_s * self.block_size, MOST_DEPTH_COST)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def open(self, prompt_tokens: Sequence[int], salt: str = "", key_spans: Sequence[Span] = ()) -> CachedSequence:
        """A sequence without blocks. Its tokens are hashed here, once. Changes nothing: any thread may call it."""
        sequence = CachedSequence(
            self.block_size, salt.encode(), anchors(key_spans, len(prompt_tokens), self.block_size)
        )
        self.append(sequence, prompt_tokens)
        return sequence

    def append(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """More tokens of the sequence are known (their KV need not be computed yet)."""
        if self.enabled:
            sequence.extend(tokens)

    def count_hits(self, sequence: CachedSequence, known_tokens: int) -> int:
        """Tokens that `admit` would reuse. Cheap: starts from the last count for this sequence."""
        return self._index.count(sequence, known_tokens - 1)

    def admit(self, sequence: CachedSequence, known_tokens: int, reserve_blocks: int = 0) -> int | None:
        """Give the sequence blocks for its `known_tokens`, reusing what is cached.

        Returns the number of tokens reused, at most `known_tokens - 1`; None, with nothing changed, where fewer than
        `reserve_blocks` would stay available. Where that number is within a block, `sequence.source` has the rows up
        to it: whoever computes the sequence copies them first into the sequence's block.
        """
        match = self._index.match(sequence, known_tokens - 1)  # the last one's logits choose the next token
        if not self._use(sequence, match, self.blocks_for(known_tokens), reserve_blocks):
            return None
        if self.evictions:
            self.evicted_too_soon += self._evicted.take(sequence.digests, len(match.nodes))
        return len(match.nodes) * self.block_size + (0 if sequence.source is None else match.rows)

    def find(self, sequence: CachedSequence, blocks: int) -> Sequence[int]:
        """The blocks that hold the sequence's beginning, at most so many; nothing changes."""
        return self._index.match(sequence, blocks * self.block_size).nodes

    def has(self, digest: bytes) -> bool:
        """Whether a block of this digest is indexed, where blocks are found by digest."""
        return isinstance(self._index, HashIndex) and digest in self._index.of

    def hold(
        self, sequence: CachedSequence, blocks: int, reserve_blocks: int = 0, *, counts_use: bool = True
    ) -> int | None:
        """Give the sequence its first `blocks` whole blocks, to be filled from another tier: `commit` them then, and
        `release` the sequence. Returns how many of them are cached, the leading ones; None, with nothing changed, where
        fewer than `reserve_blocks` would stay available. `counts_use`: whether that is a use of those cached.
        """
        nodes = self.find(sequence, blocks)
        is_held = self._use(sequence, Match(nodes), blocks, reserve_blocks, counts_use=counts_use)
        return len(nodes) if is_held else None

    def is_current(self, sequence: CachedSequence) -> bool:
        """Whether the sequence got its blocks after the last `reset`."""
        return sequence.generation == self._generation

    def _use(
        self, sequence: CachedSequence, match: Match, blocks: int, reserve_blocks: int, *, counts_use: bool = True
    ) -> bool:
        """Give the sequence `blocks` blocks, first those cached; False, with nothing changed, where they lack.

        A source that would take the last block is done without.
        """
        nodes, source, references = match.nodes, match.source, self.pool.references
        idle = sum([references(node) == 0 for node in nodes])
        spare = self.pool.available - (idle + blocks - len(nodes) + reserve_blocks)
        if spare < 0:
            return False
        if source is not None and not references(source) and not spare:
            source = None
        sequence.generation = self._generation
        self._users.add(sequence)
        anchors = sequence.anchors
        used = nodes if source is None else [*nodes, source]
        self.pool.add_references(used)
        if counts_use and nodes and self._indexed.is_followed[nodes[-1]]:
            self.pool.count_use(used)  # else it goes on where one request ended: a conversation, not a common prefix
        if counts_use:
            self.pins.touch(nodes, self._now_s)
        sequence.source = source
        sequence.blocks += nodes
        sequence.nodes += nodes
        i = 0
        while sequence.next_anchor < len(anchors) and (i := max(i, anchors[sequence.next_anchor][0])) < len(nodes):
            self._attach_keys(sequence, nodes[i], i)
            i += 1
        self.extend(sequence, blocks * self.block_size)
        return True

    def extend(self, sequence: CachedSequence, tokens: int) -> bool:
        """Give an admitted sequence blocks for `tokens` tokens; False, with nothing changed, if there are too few."""
        blocks = sequence.blocks
        missing = self.blocks_for(tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.pool.available:
            return False
        taken, evicted = self.pool.take(missing)
        if evicted:
            self._forget(evicted)
        blocks += taken
        return True

    def commit(self, sequence: CachedSequence, computed_tokens: int, *, is_last: bool = False) -> None:
        """The step that computed the first `computed_tokens` has completed: index the blocks they fill.

        A block equal to an indexed one stays the sequence's own; the sequence then also keeps a reference to the
        indexed one, the parent of what it commits next. A sequence admitted before a `reset` commits nothing.
        `is_last`: no more is computed for a while, so a block that is not full is worth indexing, too.
        """
        if sequence.source is not None:
            self._drop_source(sequence)
        if not self.enabled or sequence.generation != self._generation:
            return
        first, stop = len(sequence.nodes), computed_tokens // self.block_size
        if first < stop:
            self._commit_blocks(sequence, first, stop)
        if is_last and len(sequence.nodes) == stop and computed_tokens % self.block_size:
            self._stored[sequence.blocks[stop]] = self._steps_begun
            self._index.add_tail(sequence, computed_tokens)

    def release(self, sequence: CachedSequence) -> None:
        """The sequence needs its blocks no more; they come free when every step in progress has ended."""
        if self._steps_begun > self._steps_ended:
            self._fenced.append((self._steps_begun, sequence))
        else:
            self._free(sequence)

    def begin_step(self) -> None:
        """From here to its `end_step` the backend reads and writes blocks: none of them changes hands."""
        self._steps_begun += 1

    def end_step(self) -> None:
        """The backend is done with the oldest step in progress."""
        self._steps_ended += 1
        while self._fenced and self._fenced[0][0] <= self._steps_ended:
            self._free(self._fenced.popleft()[1])

    def reset(self) -> int:
        """Forget everything cached; returns how many unreferenced blocks that freed.

        Blocks in use stay with their users and are never indexed again.
        """
        self._generation += 1
        self._index.clear()
        self._indexed.clear()
        self._evicted.clear()
        self._keys.clear()
        before = self.pool.available
        self.pins.clear()
        self.learnt.clear()
        unpinned = self.pool.available - before
        return self.pool.free_idle() + unpinned

    @property
    def indexed_blocks(self) -> int:
        """Blocks that hold something that can be reused."""
        return self._indexed.count

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` has something to tell."""
        return self._keys.has_changes

    def take_changes(self) -> KeyChanges:
        """Net change of the held keys since the last call."""
        return self._keys.take_changes()

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Every held key by tier, parents first."""
        return self._keys.keys(), (), ()

    def survey(self) -> Survey:
        """What operators see. Its result may be taken by another thread."""
        return Survey(self.pool, self._indexed, self._stored, self.block_size, self._steps_begun)

    def check_integrity(self) -> None:
        """Raises AssertionError where an invariant of README.md does not hold. Visits everything: for tests."""
        check(self.pool, self._indexed, self._users, (self.pins, self.learnt), self._keys, self._generation)
        self._index.check()

    def _free(self, sequence: CachedSequence) -> None:
        nodes, blocks, digests = sequence.nodes, sequence.blocks, self._indexed.digests
        if sequence.source is not None:
            self._drop_source(sequence)
        held = blocks[len(nodes) :]
        held.reverse()
        for i in reversed(range(len(nodes))):  # a child before its parent: so it is evicted before it
            if nodes[i] != blocks[i]:
                held.append(nodes[i])
            held.append(blocks[i])
        self.pool.drop_references(held, [digests[block] is not None for block in held])
        sequence.blocks.clear()
        sequence.nodes.clear()
        sequence.next_anchor = 0
        self._users.discard(sequence)

    def _commit_blocks(self, sequence: CachedSequence, first: int, stop: int) -> None:
        nodes, blocks, anchors = self._index.add(sequence, first, stop), sequence.blocks, sequence.anchors
        others = [node for node, block in zip(nodes, blocks[first:stop], strict=False) if node != block]
        stored, steps = self._stored, self._steps_begun
        for block in blocks[first : first + len(nodes)]:
            stored[block] = steps
        if others:
            self.pool.add_references(others)
            self.pool.count_use(others)
        sequence.nodes += nodes
        i, stop = first, first + len(nodes)
        while sequence.next_anchor < len(anchors) and (i := max(i, anchors[sequence.next_anchor][0])) < stop:
            self._attach_keys(sequence, nodes[i - first], i)
            i += 1

    def _drop_source(self, sequence: CachedSequence) -> None:
        source, sequence.source = sequence.source, None
        assert source is not None
        self.pool.drop_references((source,), (self._indexed.digests[source] is not None,))

    def _supersede(self, block: int) -> None:
        """The rows of this block, which was not full, are in another one now, with more behind them."""
        self._indexed.remove((block,))
        if self.pool.references(block) == 0:
            self.pool.free(block)

    def _attach_keys(self, sequence: CachedSequence, node: int, index: int) -> None:
        """Anchor the sequence's keys that reach as far as its block `index`, in order."""
        held = self._indexed.keys[node]
        has_room = len(held) < MAX_KEYS_PER_BLOCK
        while sequence.next_anchor < len(sequence.anchors):
            anchor, key = sequence.anchors[sequence.next_anchor]
            if anchor > index:
                return
            if key not in held:
                if not has_room:
                    return
                self._indexed.keys[node] = held = (*held, key)
                self._keys.hold(key)
            sequence.next_anchor += 1

    def _forget(self, blocks: Sequence[int]) -> None:
        """These blocks are to hold something else: the one place where what is cached is lost, but for `reset`."""
        self.evictions += len(blocks)
        digests = self._indexed.digests
        # The rows of a block that was not full have no digest.
        self._evicted.note([digest for block in blocks if (digest := digests[block])])
        self._index.remove(blocks)
        for key in self._indexed.remove(blocks):
            self._keys.drop(key)
