"""The KV that stays in the pool after a request: what its client asks to keep, and what is likely to be wanted."""

from __future__ import annotations

from engine.cache.prefix_cache import PrefixCache
from engine.sched.entry import Entry
from engine.sched.pauses import ToolPauses

BRANCH_S = 60.0
"""Seconds that the prefix before a branch stays: a person reads the answer and may still ask for another one."""
FEW = 4
"""A prefix before a branch is pinned if at most this many requests share it. If more do, their use keeps it."""


class Retention:
    """Pins what requests ask to keep and what was learnt to be worth keeping. Ends pins if a request needs blocks."""

    def __init__(self, cache: PrefixCache, least_tokens: int) -> None:
        """`least_tokens`: the shortest beginning that is kept unasked."""
        self._cache = cache
        self._least_blocks = max(1, -(-least_tokens // cache.block_size))
        self._pauses = ToolPauses()
        self._now_s = 0.0

    def advance(self, now_s: float) -> None:
        """Note the time, in seconds of a clock that only goes forward."""
        self._now_s = now_s
        self._cache.advance(now_s)

    def started(self, entry: Entry) -> None:
        """Note that a request has its blocks. Pin its prefix if the request branches off, and learn from a request that
        goes on after an answer."""
        cache, sequence = self._cache, entry.sequence
        if not cache.learnt.most_blocks:
            return
        if entry.request.tools is not None:
            self._go_on(entry, with_result=entry.request.tools.brings_result)
        reused = len(sequence.nodes)
        if reused >= self._least_blocks and 1 < cache.branches_off(sequence) <= FEW:
            cache.keep(sequence, reused, BRANCH_S, is_asked=False)

    def ended(self, entry: Entry) -> None:
        """Pin the conversation of a request that has its last token, if a tool may run now. The request must still have
        its blocks."""
        cache, sequence, tools = self._cache, entry.sequence, entry.request.tools
        last = len(entry.request.prompt_tokens) // cache.block_size - 1
        if tools is None or not tools.may_be_called or not 0 <= last < len(sequence.digests):
            return
        if not cache.learnt.most_blocks:
            return
        self._pauses.ended(sequence.digests[last], self._now_s)
        lifetime_s = self._pauses.lifetime_s
        if lifetime_s and len(sequence.nodes) >= self._least_blocks:
            cache.keep(sequence, len(sequence.nodes), lifetime_s, is_asked=False)

    def computed(self, entry: Entry) -> None:
        """Pin what a request with marks asks for, once its whole prompt is computed."""
        if entry.kept_tokens is not None or entry.computed_tokens < len(entry.request.prompt_tokens):
            return
        block_size, asked, kept = self._cache.block_size, 0, 0
        for mark in entry.request.marks:
            blocks = mark.tokens // block_size
            asked = max(asked, blocks)
            kept = max(kept, self._cache.keep(entry.sequence, blocks, mark.lifetime_s))
        entry.kept_tokens, entry.unkept_tokens = kept * block_size, (asked - kept) * block_size

    def gives(self, blocks: int) -> bool:
        """End pins that no client asked for, because running requests need blocks; return False if this frees none."""
        return self._cache.learnt.give_up(blocks) > 0

    def yields(self, entry: Entry, hits: int, reserve_blocks: int, *, is_alone: bool) -> bool:
        """End pins that no client asked for if that lets a waiting request fit; `hits` of its tokens are cached.

        If nothing runs whose end would make room (`is_alone`), also end pins that clients asked for. Returns False if
        the request still does not fit.
        """
        cache = self._cache
        if not cache.learnt and not (is_alone and cache.pins):
            return False
        least = cache.blocks_for(entry.known_tokens) - hits // cache.block_size + reserve_blocks - cache.pool.available
        if not is_alone and least > cache.learnt.spare:
            return False
        while lack := cache.lacks(entry.sequence, entry.known_tokens, reserve_blocks):
            gives = lack <= cache.learnt.spare and cache.learnt.give_up(lack) > 0
            if not gives and not (is_alone and self._yields_all(lack)):
                return False
        return True

    def _yields_all(self, blocks: int) -> bool:
        before = self._cache.pool.available
        self._cache.learnt.clear()
        self._cache.pins.give_up(blocks - (self._cache.pool.available - before))
        return self._cache.pool.available > before

    def _go_on(self, entry: Entry, *, with_result: bool) -> None:
        """Learn from a request that goes on where an answer ended, and end the pins that were kept for it."""
        sequence, pauses = entry.sequence, self._pauses
        place = next(
            (i for i in reversed(range(len(sequence.digests))) if pauses.is_awaited(sequence.digests[i])), None
        )
        if place is None:
            return
        pauses.goes_on(sequence.digests[place], self._now_s, with_result=with_result)
        for block in sequence.nodes[place:]:
            self._cache.learnt.end_at(block)
