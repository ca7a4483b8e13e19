"""What of a request's KV stays in the pool after it: the beginnings that its client asks to keep."""

from __future__ import annotations

from engine.cache.prefix_cache import PrefixCache
from engine.sched.entry import Entry


class Retention:
    """Pins what requests ask to keep, and ends pins where a request could not run for them."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def computed(self, entry: Entry) -> None:
        """More of a request with marks is computed: pin what it asks for once its whole prompt is there."""
        if entry.kept_tokens is not None or entry.computed_tokens < len(entry.request.prompt_tokens):
            return
        block_size, asked, kept = self._cache.block_size, 0, 0
        for mark in entry.request.marks:
            blocks = mark.tokens // block_size
            asked = max(asked, blocks)
            kept = max(kept, self._cache.keep(entry.sequence, blocks, mark.lifetime_s))
        entry.kept_tokens, entry.unkept_tokens = kept * block_size, (asked - kept) * block_size

    def yields(self, known_tokens: int) -> bool:
        """A request of so many tokens does not fit though nothing runs: end pins for it. False: there are none."""
        pins = self._cache.pins
        return bool(pins) and pins.give_up(self._cache.blocks_for(known_tokens) - self._cache.pool.available)
