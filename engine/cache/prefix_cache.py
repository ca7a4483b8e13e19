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
from engine.cache.loops import SPARED_SHARE, Loops
from engine.cache.pins import Pins
from engine.cache.radix_index import RadixIndex
from engine.cache.sequence import CachedSequence
from engine.cache.survey import Survey
from engine.contract.events import Keys

MAX_KEYS_PER_BLOCK = 32
"""A block with this many keys passes further ones on to the next block of their chain: otherwise a popular block
would collect a key from every request that branches off soon after it."""


class PrefixCache:
    """KV blocks of requests, indexed by content once computed. A `PrefixIndex` finds shared prefixes.

    Use: `open` a sequence, `admit` it, `extend` it before a step that needs more room, `commit` after the step,
    `release`. Each step is bracketed by `begin_step` and `end_step`, and steps end in the order in which they began.
    Released blocks become free when every step begun before the release has ended.
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
        """The most blocks pinned at a time: `pinned_blocks` because clients ask, `learnt_blocks` unasked."""
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
        """Chains that clients ask to keep. Every use renews their time."""
        self.learnt = Pins(self.pool, self._indexed, learnt_blocks, are_guesses=True)
        """Chains that are likely to be asked for soon. No use renews them; they are given up before a request waits."""
        self._now_s = 0.0
        self._keys = HeldKeys()
        self._users: set[CachedSequence] = set()
        self._steps_begun = self._steps_ended = 0
        self._fenced: deque[tuple[int, CachedSequence]] = deque()
        """Released sequences, each with the number of the last step begun before its release."""
        self._generation = 0
        self.evictions = 0
        """Number of indexed blocks whose content was evicted, since the start."""
        self.evicted_too_soon = 0
        """Number of evicted blocks asked for again before about four pools' worth of other blocks were evicted."""
        self._evicted = EvictedLately(blocks_total)
        self._loops = Loops(blocks_total)
        self._stored = array("q", bytes(8 * blocks_total))
        """By block: the number of steps begun when it was indexed."""

    def advance(self, now_s: float) -> None:
        """Note the time, in seconds of any clock that only goes forward. Pins whose time is over end."""
        self._now_s = now_s
        self.pins.expire(now_s)
        self.learnt.expire(now_s)

    def keep(self, sequence: CachedSequence, blocks: int, lifetime_s: float, *, is_asked: bool = True) -> int:
        """Pin the sequence's first `blocks` blocks, as far as they are indexed; return how many of them are pinned.

        `is_asked`: a client asks for it.
        """
        if sequence.generation != self._generation:
            return 0
        pins = self.pins if is_asked else self.learnt
        return pins.keep(sequence.nodes[:blocks], lifetime_s, self._now_s, sequence.salt)

    def lacks(self, sequence: CachedSequence, known_tokens: int, reserve_blocks: int = 0) -> int:
        """Return how many blocks must become available before `admit` would succeed; 0: it would succeed now."""
        nodes = self._index.match(sequence, known_tokens - 1).nodes
        reused = len(nodes) - self.pool.count_idle(nodes)
        return max(0, self.blocks_for(known_tokens) - reused + reserve_blocks - self.pool.available)

    def branches_off(self, sequence: CachedSequence) -> int:
        """Return how many requests shared the last block that this sequence reuses; 0 if no chain goes on after it."""
        if not sequence.nodes or not self._indexed.is_followed[sequence.nodes[-1]]:
            return 0
        return self.pool.uses(sequence.nodes[-1])

    def learn_cost(self, token_s: float, attention_s: float) -> None:
        """Note the seconds that a token takes to compute, and the extra seconds for each token before it.

        0, 0: not known yet. Only eviction by cost uses this.
        """
        if self._worth is not None and self._weighs_depth and token_s > 0:
            self._worth.depth_cost = min(attention_s / token_s * self.block_size, MOST_DEPTH_COST)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold the KV of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def open(self, prompt_tokens: Sequence[int], salt: str = "", key_spans: Sequence[Span] = ()) -> CachedSequence:
        """Return a sequence without blocks. Its tokens are hashed here, once. Any thread may call this: the cache does
        not change."""
        sequence = CachedSequence(
            self.block_size, salt.encode(), anchors(key_spans, len(prompt_tokens), self.block_size)
        )
        self.append(sequence, prompt_tokens)
        return sequence

    def append(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Add known tokens to the sequence (their KV need not be computed yet)."""
        if self.enabled:
            sequence.extend(tokens)

    def count_hits(self, sequence: CachedSequence, known_tokens: int) -> int:
        """Return how many tokens `admit` would reuse. Cheap: starts from the last count for this sequence."""
        return self._index.count(sequence, known_tokens - 1)

    def admit(self, sequence: CachedSequence, known_tokens: int, reserve_blocks: int = 0) -> int | None:
        """Give the sequence blocks for its `known_tokens`, reusing what is cached.

        Returns the number of tokens reused, at most `known_tokens - 1`; None, with nothing changed, if fewer than
        `reserve_blocks` would stay available. If the reuse ends within a block, `sequence.source` has that block's
        first rows: the backend copies them into the sequence's own block before it computes the sequence.
        """
        match = self._index.match(sequence, known_tokens - 1)  # the last token's logits choose the next token
        if not self._use(sequence, match, self.blocks_for(known_tokens), reserve_blocks):
            return None
        if self.evictions:
            self._note_evicted(sequence, len(match.nodes))
        return len(match.nodes) * self.block_size + (0 if sequence.source is None else match.rows)

    def find(self, sequence: CachedSequence, blocks: int) -> Sequence[int]:
        """Return the blocks that hold the sequence's prefix, at most `blocks`; the cache does not change."""
        return self._index.match(sequence, blocks * self.block_size).nodes

    def has(self, digest: bytes) -> bool:
        """Whether a block of this digest is indexed. False unless the index is by digest."""
        return isinstance(self._index, HashIndex) and digest in self._index.of

    def hold(
        self, sequence: CachedSequence, blocks: int, reserve_blocks: int = 0, *, counts_use: bool = True
    ) -> int | None:
        """Give the sequence its first `blocks` whole blocks, to be filled from another tier.

        The caller then commits them and releases the sequence. Returns how many leading blocks are cached; None, with
        nothing changed, if fewer than `reserve_blocks` would stay available. `counts_use`: whether this counts as a use
        of the cached ones.
        """
        nodes = self.find(sequence, blocks)
        is_held = self._use(sequence, Match(nodes), blocks, reserve_blocks, counts_use=counts_use)
        return len(nodes) if is_held else None

    def hold_cached(self, sequence: CachedSequence, blocks: int) -> int:
        """Like `hold`, but take only the cached blocks, which always fit; return how many there are."""
        nodes = self.find(sequence, blocks)
        is_held = self._use(sequence, Match(nodes), len(nodes), 0)
        assert is_held
        return len(nodes)

    def is_current(self, sequence: CachedSequence) -> bool:
        """Whether the sequence got its blocks after the last `reset`."""
        return sequence.generation == self._generation

    def _use(
        self, sequence: CachedSequence, match: Match, blocks: int, reserve_blocks: int, *, counts_use: bool = True
    ) -> bool:
        """Give the sequence `blocks` blocks, the cached ones first; return False, with nothing changed, if too few are
        available. A source that no other sequence uses is left out if no block beyond these is available for it.
        """
        nodes, source, references = match.nodes, match.source, self.pool.references
        idle = self.pool.count_idle(nodes)
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
        if counts_use and nodes and self._indexed.is_followed[nodes[-1]] and not self._comes_back(sequence, nodes):
            self.pool.count_use(used)  # otherwise the sequence continues a conversation: its prefix is not shared
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
        """Give an admitted sequence blocks for `tokens` tokens; return False, with nothing changed, if too few are
        available."""
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
        """Index the blocks that the first `computed_tokens` fill, after the step that computed them has ended.

        If a block equals an indexed one, the sequence keeps its own block. It then also keeps a reference to the
        indexed one, which is the parent of what it commits next. A sequence admitted before a `reset` commits nothing.
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
            self.pool.begin_uses((sequence.blocks[stop],))
            self._index.add_tail(sequence, computed_tokens)

    def release(self, sequence: CachedSequence) -> None:
        """Release the sequence's blocks. They become free when every step in progress has ended."""
        if self._steps_begun > self._steps_ended:
            self._fenced.append((self._steps_begun, sequence))
        else:
            self._free(sequence)

    def begin_step(self) -> None:
        """Note that a step begins. Until its `end_step` the backend reads and writes blocks, so none changes hands."""
        self._steps_begun += 1

    def end_step(self) -> None:
        """Note that the backend is done with the oldest step in progress."""
        self._steps_ended += 1
        while self._fenced and self._fenced[0][0] <= self._steps_ended:
            self._free(self._fenced.popleft()[1])

    def reset(self) -> int:
        """Forget everything cached; return how many unreferenced blocks that freed.

        Blocks in use stay with their users and are never indexed again.
        """
        self._generation += 1
        self._index.clear()
        self._indexed.clear()
        self._evicted.clear()
        self._loops.clear()
        self._keys.clear()
        before = self.pool.available
        self.pins.clear()
        self.learnt.clear()
        unpinned = self.pool.available - before
        return self.pool.free_idle() + unpinned

    @property
    def indexed_blocks(self) -> int:
        """Number of blocks whose content can be reused."""
        return self._indexed.count

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` has changes to return."""
        return self._keys.has_changes

    def take_changes(self) -> KeyChanges:
        """Return the net change of the held keys since the last call."""
        return self._keys.take_changes()

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Return every held key by tier, parents first."""
        return self._keys.keys(), (), ()

    def survey(self) -> Survey:
        """Return a survey for operators. Another thread may take its result."""
        return Survey(self.pool, self._indexed, self._stored, self.block_size, self._steps_begun)

    def _free(self, sequence: CachedSequence) -> None:
        nodes, blocks, digests = sequence.nodes, sequence.blocks, self._indexed.digests
        if sequence.source is not None:
            self._drop_source(sequence)
        held = blocks[::-1]  # a child before its parent, so that the child is evicted first
        if nodes != blocks[: len(nodes)]:
            del held[len(blocks) - len(nodes) :]
            for i in reversed(range(len(nodes))):
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
        own, stored, steps = blocks[first : first + len(nodes)], self._stored, self._steps_begun
        for block in own:
            stored[block] = steps
        before = sequence.remembered[first - sequence.remembered_from :] if sequence.remembered else b""
        self.pool.begin_uses(own, before)
        if nodes != own:
            others = [node for node, block in zip(nodes, own, strict=True) if node != block]
            self.pool.add_references(others)
            self.pool.count_use(others)
        if first < sequence.spared:
            self._spare(nodes[: sequence.spared - first])
        sequence.nodes += nodes
        i, stop = first, first + len(nodes)
        while sequence.next_anchor < len(anchors) and (i := max(i, anchors[sequence.next_anchor][0])) < stop:
            self._attach_keys(sequence, nodes[i - first], i)
            i += 1

    def _comes_back(self, sequence: CachedSequence, nodes: Sequence[int]) -> bool:
        """Whether the block after these was evicted and is asked for again, and no other request shared the last of
        these.

        Then this is the same conversation, whose end was lost, and not another request with the same beginning.
        """
        hits, digests = len(nodes), sequence.digests
        if not self.evictions or hits >= len(digests) or self.pool.uses(nodes[-1]) > 1:
            return False
        return self._evicted.has(digests[hits])

    def _note_evicted(self, sequence: CachedSequence, hits: int) -> None:
        """Count the blocks of a sequence, admitted with `hits` cached blocks, that were evicted too soon.

        Blocks that several requests had shared count as shared again. If the last lost block was shared, this request
        counts as one more use of the lost blocks. Otherwise the request continues a conversation.
        """
        uses = self._evicted.take(sequence.digests, hits)
        lost = len(uses)
        self.evicted_too_soon += lost
        is_shared = lost > 0 and uses[-1] > 1
        sequence.remembered_from, sequence.remembered = hits, bytes([many + is_shared for many in uses])
        if self._worth is not None:
            is_spared, asked = bool(hits) and self._worth.is_spared(sequence.nodes[hits - 1]), len(sequence.digests)
            came_back = lost if hits + lost >= asked - 1 else 0  # a conversation that goes on brings something new
            is_loop = self._loops.admitted(asked - (hits if is_spared else 0), came_back)
            sequence.spared = hits + lost if is_loop else 0

    def _spare(self, blocks: Sequence[int]) -> None:
        """Spare as many of these blocks as the bound allows: they were indexed just now and are part of a loop."""
        assert self._worth is not None
        room = int(SPARED_SHARE * self.pool.total) - self._worth.spared
        self._worth.spare(blocks[: max(0, room)])

    def _drop_source(self, sequence: CachedSequence) -> None:
        source, sequence.source = sequence.source, None
        assert source is not None
        self.pool.drop_references((source,), (self._indexed.digests[source] is not None,))

    def _supersede(self, block: int) -> None:
        """Unindex this block, which was not full: another block now has its rows, and more after them."""
        self._indexed.remove((block,))
        if self.pool.references(block) == 0:
            self.pool.free(block)

    def _attach_keys(self, sequence: CachedSequence, node: int, index: int) -> None:
        """Anchor the sequence's next keys whose anchor is at or before its block `index`, in order."""
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
        """Unindex these blocks, which will hold something else. Except in `reset`, cached content is lost only here."""
        self.evictions += len(blocks)
        digests, uses = self._indexed.digests, self.pool.uses
        full = [block for block in blocks if digests[block]]  # a block that is not full has no digest
        self._evicted.note([digests[block] or b"" for block in full], map(uses, full))
        self._index.remove(blocks)
        for key in self._indexed.remove(blocks):
            self._keys.drop(key)
