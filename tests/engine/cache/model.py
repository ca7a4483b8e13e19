"""A plain model of the prefix cache: dictionaries keyed by whole token prefixes, no hashes, no linked lists."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.eviction import LeastRecentlyUsed
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.sched.request import KeySpan
from tests.engine.cache.integrity import check_integrity

Prefix = tuple[str, tuple[int, ...]]
"""A salt, and the tokens of a chain up to the last token in a block."""


@dataclass(eq=False)
class User:
    """A request as the model sees it."""

    salt: str
    tokens: list[int]
    spans: tuple[KeySpan, ...]
    sequence: CachedSequence
    computed: int = 0
    canonical: list[int] = field(default_factory=list)
    """The cached block of each leading prefix that was hit or committed. It is not evicted while this request runs,
    even if another request computed it."""
    source: int | None = None
    """The block from which rows are copied. It is not evicted until this request commits."""
    tail: int | None = None
    """The request's last block, if it was indexed without being full."""
    is_stale: bool = False
    """Whether the request was admitted before a reset."""


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return how many leading tokens the two have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Model:
    """Knows what must be cached, with what content, and which blocks may be evicted."""

    cache: PrefixCache
    kind: IndexKind = IndexKind.HASH
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

    def expected_tokens(self, user: User) -> int:
        """Return the tokens that the index must find: whole blocks and, with a radix tree, rows of one more."""
        whole = self.expected_hits(user) * self.cache.block_size
        if self.kind is not IndexKind.RADIX or not whole:
            return whole
        known = tuple(user.tokens[:-1])
        return max([whole, *(shared(tokens, known) for salt, tokens in self.cached if salt == user.salt)])

    def admitted(self, user: User, cached_tokens: int, free_before: int, is_tight: bool) -> None:
        """Check that the hits of an admission are right, and that its evictions are those of leaf-first LRU.

        `is_tight`: the user needed every available block, so none was left from which to copy rows.
        """
        hits, expected, source = self.expected_hits(user), self.expected_tokens(user), user.sequence.source
        rows = cached_tokens - hits * self.cache.block_size
        assert 0 <= rows < self.cache.block_size
        assert cached_tokens < len(user.tokens)
        assert (source is None) == (rows == 0)
        assert cached_tokens == expected or (is_tight and not rows)
        if source is not None:
            salt, tokens = self.content[source]
            assert salt == user.salt
            assert tokens[:cached_tokens] == tuple(user.tokens[:cached_tokens]), "wrong rows would be copied"
            for prefix in [prefix for prefix, block in self.cached.items() if block == source]:
                self.idle_since.pop(prefix, None)
            user.source = source
        assert user.sequence.blocks[:hits] == [self.cached[self.prefix(user, i)] for i in range(hits)]
        user.computed, user.is_stale = cached_tokens, False
        user.canonical = user.sequence.blocks[:hits]
        for i in range(hits):
            self.idle_since.pop(self.prefix(user, i), None)
            self.attach(user, i)
        self.users.append(user)
        self.taken(user.sequence.blocks[hits:], free_before)
        if source is not None:
            self.content[user.sequence.blocks[hits]] = (user.salt, tuple(user.tokens[:cached_tokens]))

    def taken(self, blocks: list[int], free_before: int) -> None:
        """Check and note the blocks that the cache gave to a request, in this order."""
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
        """Note that a step computes the user's tokens up to `end`."""
        size = self.cache.block_size
        for position in range(user.computed, end):
            block = user.sequence.blocks[position // size]
            assert sum(block in other.sequence.blocks for other in self.users) == 1, "a shared block was written"
            self.content[block] = (user.salt, tuple(user.tokens[: position + 1]))
        user.computed = end

    def committed(self, user: User, *, is_last: bool = False) -> None:
        self.drop_source(user)
        if user.is_stale or self.kind is IndexKind.OFF:
            return
        size = self.cache.block_size
        for i in range(len(user.canonical), user.computed // size):
            user.canonical.append(self.store(self.prefix(user, i), user.sequence.blocks[i]))
            self.attach(user, i)
            user.tail = None
        if is_last and self.kind is IndexKind.RADIX and user.computed % size:
            tail = user.salt, tuple(user.tokens[: user.computed])
            if not any(salt == user.salt and shared(t, tail[1]) == user.computed for salt, t in self.cached):
                user.tail = self.store(tail, user.sequence.blocks[user.computed // size])

    def store(self, prefix: Prefix, block: int) -> int:
        """Return the block that is cached for this prefix from now on. Tails with fewer of its tokens are dropped."""
        size, (salt, tokens) = self.cache.block_size, prefix
        for n in range((len(tokens) - 1) // size * size + 1, len(tokens)):
            self.cached.pop((salt, tokens[:n]), None)
            self.idle_since.pop((salt, tokens[:n]), None)
        self.idle_since.pop(prefix, None)
        return self.cached.setdefault(prefix, block)

    def drop_source(self, user: User) -> None:
        if user.source is not None:
            block, user.source = user.source, None
            self.clock += 1
            self.rest(block, 0)

    def is_idle(self, block: int) -> bool:
        return any(self.cached[prefix] == block for prefix in self.idle_since)

    def rest(self, block: int, depth: int) -> None:
        """Make the block idle if it is cached and no request uses it any more. Deeper blocks are evicted first."""
        used = {b for other in self.users for b in (*other.canonical, other.source, other.tail)}
        for prefix in [prefix for prefix, b in self.cached.items() if b == block and b not in used]:
            self.idle_since[prefix] = (self.clock, -depth)

    def attach(self, user: User, block: int) -> None:
        """Anchor the user's keys that belong at this block. Keys shorter than a block go with the next key."""
        size = self.cache.block_size
        at = [span.tokens // size - 1 for span in user.spans]
        first = next((b for b in at if b >= 0), None)
        if first is None:
            return
        here = {span.key for span, b in zip(user.spans, at, strict=True) if max(b, first) == block}
        self.keys_at.setdefault(self.prefix(user, block), set()).update(here)

    def released(self, user: User) -> None:
        self.drop_source(user)
        self.users.remove(user)
        self.clock += 1
        tail, user.tail = user.tail, None
        if not user.is_stale:
            for i, block in enumerate([*user.canonical, tail]):
                if block is not None:
                    self.rest(block, i)

    def was_reset(self) -> int:
        freed = len(self.idle_since)
        self.cached.clear()
        self.idle_since.clear()
        self.keys_at.clear()
        for user in self.users:
            user.is_stale = True
        return freed

    def check(self) -> None:
        """Check everything that must hold between operations."""
        check_integrity(self.cache)
        size = self.cache.block_size
        for user in self.users:
            for i, block in enumerate(user.sequence.blocks[: self.cache.blocks_for(user.computed)]):
                salt, tokens = self.content[block]
                assert salt == user.salt
                expected = user.tokens[: min((i + 1) * size, user.computed)]
                assert list(tokens[: len(expected)]) == expected, "a block in use lost its content"
        for (salt, tokens), block in self.cached.items():
            held_salt, held = self.content[block]
            assert (held_salt, held[: len(tokens)]) == (salt, tokens)
            assert len(held) == len(tokens) or len(tokens) % size, "only tails have more rows than indexed"
        in_use = {block for user in self.users for block in user.sequence.blocks}
        in_use |= {block for user in self.users for block in user.canonical}
        in_use |= {user.source for user in self.users if user.source is not None}
        assert self.cache.pool.available == self.cache.pool.total - len(in_use)
