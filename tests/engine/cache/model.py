"""A plain model of the prefix cache: dictionaries keyed by whole token prefixes, no hashes, no linked lists."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.eviction import LeastRecentlyUsed
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.sched.request import KeySpan

Prefix = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class User:
    """A request as the model sees it."""

    salt: str
    tokens: list[int]
    spans: tuple[KeySpan, ...]
    sequence: CachedSequence
    computed: int = 0
    canonical: list[int] = field(default_factory=list)
    """The cached block for each leading block hit or committed: kept for this request, its own or not."""
    is_stale: bool = False
    """Admitted before a reset."""


@dataclass
class Model:
    """What must be cached, with what content, and who may lose it."""

    cache: PrefixCache
    cached: dict[Prefix, int] = field(default_factory=dict)
    content: dict[int, Prefix] = field(default_factory=dict)
    """What was last written to a block."""
    idle_since: dict[Prefix, tuple[int, int]] = field(default_factory=dict)
    keys_at: dict[Prefix, set[int]] = field(default_factory=dict)
    users: list[User] = field(default_factory=list)
    clock: int = 0

    def prefix(self, user: User, block: int) -> Prefix:
        return user.salt, tuple(user.tokens[: (block + 1) * self.cache.block_size])

    def expected_hits(self, user: User) -> int:
        hits = 0
        while (hits + 1) * self.cache.block_size < len(user.tokens) and self.prefix(user, hits) in self.cached:
            hits += 1
        return hits

    def admitted(self, user: User, cached_tokens: int, free_before: int) -> None:
        """The cache admitted the user: were hits right, and evictions those of leaf-first LRU?"""
        hits = self.expected_hits(user)
        assert cached_tokens == hits * self.cache.block_size < len(user.tokens)
        assert user.sequence.blocks[:hits] == [self.cached[self.prefix(user, i)] for i in range(hits)]
        user.computed, user.is_stale = cached_tokens, False
        user.canonical = user.sequence.blocks[:hits]
        for i in range(hits):
            self.idle_since.pop(self.prefix(user, i), None)
            self.attach(user, i)
        self.users.append(user)
        self.taken(user.sequence.blocks[hits:], free_before)

    def taken(self, blocks: list[int], free_before: int) -> None:
        """The cache gave these blocks to a request, in this order."""
        by_block = {block: prefix for prefix, block in self.cached.items()}
        for n, block in enumerate(blocks):
            evicted = by_block.get(block)
            assert (evicted is None) == (n < free_before), "free blocks go before cached ones"
            if evicted is not None:
                assert evicted in self.idle_since, "a block in use was evicted"
                if isinstance(self.cache.pool.order, LeastRecentlyUsed):
                    assert self.idle_since[evicted] == min(self.idle_since.values()), "not the least recently used"
                salt, tokens = evicted
                assert not any(
                    s == salt and len(t) > len(tokens) and t[: len(tokens)] == tokens for s, t in self.cached
                )
                del self.cached[evicted], self.idle_since[evicted]
                self.keys_at.pop(evicted, None)
            self.content.pop(block, None)

    def write(self, user: User, end: int) -> None:
        """A step computes the user's tokens up to `end`."""
        size = self.cache.block_size
        for position in range(user.computed, end):
            block = user.sequence.blocks[position // size]
            assert sum(block in other.sequence.blocks for other in self.users) == 1, "a shared block was written"
            self.content[block] = (user.salt, tuple(user.tokens[: position + 1]))
        user.computed = end

    def committed(self, user: User) -> None:
        if user.is_stale or not self.cache.enabled:
            return
        for i in range(len(user.canonical), user.computed // self.cache.block_size):
            user.canonical.append(self.cached.setdefault(self.prefix(user, i), user.sequence.blocks[i]))
            self.idle_since.pop(self.prefix(user, i), None)
            self.attach(user, i)

    def attach(self, user: User, block: int) -> None:
        """Keys of the user that lie at this block; those shorter than any block lie with the next one."""
        size = self.cache.block_size
        at = [span.tokens // size - 1 for span in user.spans]
        first = next((b for b in at if b >= 0), None)
        if first is None:
            return
        here = {span.key for span, b in zip(user.spans, at, strict=True) if max(b, first) == block}
        self.keys_at.setdefault(self.prefix(user, block), set()).update(here)

    def released(self, user: User) -> None:
        self.users.remove(user)
        self.clock += 1
        used = {block for other in self.users for block in other.canonical}
        if not user.is_stale:
            for i, block in enumerate(user.canonical):
                if block not in used:
                    self.idle_since[self.prefix(user, i)] = (self.clock, -i)

    def was_reset(self) -> int:
        freed = len(self.idle_since)
        self.cached.clear()
        self.idle_since.clear()
        self.keys_at.clear()
        for user in self.users:
            user.is_stale = True
        return freed

    def check(self) -> None:
        """Everything that must hold between operations."""
        self.cache.check_integrity()
        size = self.cache.block_size
        for user in self.users:
            for i, block in enumerate(user.sequence.blocks[: self.cache.blocks_for(user.computed)]):
                salt, tokens = self.content[block]
                assert salt == user.salt
                expected = user.tokens[: min((i + 1) * size, user.computed)]
                assert list(tokens[: len(expected)]) == expected, "a block in use lost its content"
        for (salt, tokens), block in self.cached.items():
            assert self.content[block] == (salt, tokens)
        in_use = {block for user in self.users for block in user.sequence.blocks}
        in_use |= {block for user in self.users for block in user.canonical}
        assert self.cache.pool.available == self.cache.pool.total - len(in_use)
