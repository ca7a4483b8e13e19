"""Finds the last whole block that each prefix key covers, without a tokenizer. Pure.

A request has one key for each stride of its bytes, and blocks of a fixed number of tokens. Its numbers of bytes and
tokens are known or estimated. Key i covers (i + 1) * stride bytes. How many tokens the key covers is interpolated
between points at which both numbers are known:

    the beginning        0 bytes are 0 tokens
    the end              of this request, and of every other request that is a prefix of it
    a crossing           of two requests that share k keys and no more: their bytes diverge in stride k, their blocks in
                         some block m, and the byte at which they diverge lies in both

A crossing also gives bounds. Keys 0 to k-1 cover common text, so they cover at most m blocks. Key k covers the
diverging byte, so it covers at least m blocks. Both bounds stay true, however the tokens in between are spread. The
first bound also holds if one request is a prefix of the other: their tokens may differ at the end of the shorter one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from engine.contract.keys import PrefixKey
from router.events.tree import Node, chain, common_depth, kept

MAX_BLOCK_KEYS = 1024
"""Keys that one block remembers. One prompt has fewer on a block. Prompts that differ only after their last whole block
each have a key there, and that block stays for as long as such prompts come."""
_NO_BOUND = 2**31


class Request:
    """A request at a pod; its blocks are looked for. Requests are compared by identity only."""

    __slots__ = (
        "block_tokens",
        "fork",
        "home",
        "is_compared",
        "is_told",
        "keys",
        "parted",
        "prefilled",
        "size_bytes",
        "tip",
        "tokens",
    )

    def __init__(self, keys: Sequence[PrefixKey], size_bytes: float, tokens: float) -> None:
        """`tokens`: estimated tokens of the prompt."""
        self.keys = keys
        self.size_bytes = size_bytes
        self.tokens = tokens
        self.is_told = False
        """Whether the engine said how many tokens the prompt has."""
        self.tip: Node | None = None
        """The last known block; blocks of generated tokens follow those of the prompt."""
        self.home: KeyMap | None = None
        """The map of the tree that `tip` is in. An engine that is started anew with another block size has another."""
        self.block_tokens = 1
        self.prefilled = 0
        """Depth of the last block that was stored together with others, or that was the request's first. Blocks of
        generated tokens are stored one by one, so the prompt ends in the block after it."""
        self.fork: tuple[Request, int] | None = None
        """(Another request, how many keys it shares with this one), while the number of shared blocks is not known."""
        self.parted: tuple[int, int] | None = None
        """(Keys, blocks) that it shares with another request, if both requests have further keys and blocks."""
        self.is_compared = False
        """Whether another request to compare with has been looked for."""

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of the prompt."""
        return int(self.tokens // self.block_tokens)


class _Entry:
    """One key: its block, bounds of its depth, and points near its end at which both bytes and tokens are known."""

    __slots__ = ("end", "highest", "lowest", "node", "parts_in", "request")

    def __init__(self, node: Node, request: Request) -> None:
        self.node = node
        self.request = request
        """The last request that has the key."""
        self.lowest = 0
        self.highest = _NO_BOUND
        self.end: tuple[float, float] | None = None
        """Bytes and tokens of a request that ends after this key and before the next."""
        self.parts_in: int | None = None
        """Block in which requests diverge if they share this key and no more."""


class KeyMap:
    """The blocks of prefix keys of one model."""

    def __init__(self, stride: int, on_moved: Callable[[int, PrefixKey], None]) -> None:
        """`on_moved(pods, key)`: the key has another block now, so these pods may begin or cease to hold it."""
        self._stride = stride
        self._on_moved = on_moved
        self._entries: dict[PrefixKey, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def node(self, key: PrefixKey) -> Node | None:
        """Return the block up to which a pod has to hold a prompt to hold the key; None if that is not known."""
        entry = self._entries.get(key)
        return None if entry is None else entry.node

    def unknown(self, keys: Sequence[PrefixKey]) -> bool:
        """Return whether the last of the keys has no block. If so, some keys are only believed to be held."""
        return bool(keys) and keys[-1] not in self._entries

    def forget(self, key: PrefixKey) -> None:
        """Forget a key, because its block is forgotten."""
        self._entries.pop(key, None)

    def place(self, request: Request) -> None:
        """Find the blocks of the request's keys. Call this when its tip, its tokens or its end becomes known."""
        if request.tip is None or not request.keys:
            return
        other = self._cross(request)
        self._place(request)
        if other is not None:
            self._place(other)

    def _cross(self, request: Request) -> Request | None:
        """Compare with the last request that shares the most keys. Return that request if it diverges from this one."""
        assert request.tip is not None
        entries, keys = self._entries, request.keys
        if not request.is_compared:
            request.is_compared = True
            known = 0
            for key in keys:
                if key not in entries:
                    break
                known += 1
            if known:
                other = entries[keys[known - 1]].request
                while known < min(len(keys), len(other.keys)) and keys[known] == other.keys[known]:
                    known += 1
                if other.tip is not None and other is not request:
                    request.fork = (other, known)
        if request.fork is None:
            return None
        other, known = request.fork
        assert other.tip is not None
        depth = common_depth(request.tip, other.tip)
        # Only blocks that both have show where they diverge: one request may be stored only in part so far.
        if depth < 0 or other.block_tokens != request.block_tokens:
            request.fork = None
            return None
        if depth >= min(request.tip.depth, other.tip.depth):
            return None
        request.fork = None
        last = entries.get(keys[known - 1])
        if last is None:
            return None
        last.highest = min(last.highest, depth)
        if known < min(len(keys), len(other.keys)):
            last.parts_in = depth if last.parts_in is None else min(depth, last.parts_in)
            request.parted = (known, depth)
            theirs = entries.get(other.keys[known])
            if theirs is not None:
                theirs.lowest = max(theirs.lowest, depth)
        return other

    def _place(self, request: Request) -> None:
        assert request.tip is not None
        blocks = chain(kept(request.tip))
        entries, keys = self._entries, request.keys
        for at, (key, depth) in enumerate(zip(keys, self._depths(request), strict=True)):
            if depth > len(blocks):
                break
            node = blocks[depth - 1]
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = _Entry(node, request)
                self._attach(node, key, request)
                self._on_moved(node.rooted, key)
            elif request.is_told or not entry.request.is_told:  # an estimate must not replace what is known
                entry.request = request
                if entry.node is not node:
                    self._move(key, entry, node, request)
            if request.parted is not None and request.parted[0] == at:
                entry.lowest = max(entry.lowest, request.parted[1])
        last = entries.get(keys[-1])
        if request.is_told and last is not None:
            last.end = (request.size_bytes, request.tokens)

    def _move(self, key: PrefixKey, entry: _Entry, node: Node, request: Request) -> None:
        old = entry.node
        assert old.keys is not None
        old.keys.remove(key)
        entry.node = node
        self._attach(node, key, request)
        self._on_moved(old.rooted | node.rooted, key)

    def _attach(self, node: Node, key: PrefixKey, request: Request) -> None:
        """Note that the block stands for the key. If it has too many keys, forget its oldest key that is not of
        `request`."""
        if node.keys is None:
            node.keys = [key]
            return
        node.keys.append(key)
        if len(node.keys) > MAX_BLOCK_KEYS:
            entries = self._entries
            places = (at for at, other in enumerate(node.keys) if entries[other].request is not request)
            oldest = node.keys.pop(next(places, 0))
            del entries[oldest]
            self._on_moved(node.rooted, oldest)

    def _depths(self, request: Request) -> list[int]:
        """Return how many blocks each key covers: at least one, at most the prompt's, never fewer than the key
        before."""
        entries, keys, size = self._entries, request.keys, request.block_tokens
        most = max(1, request.prompt_blocks)
        known = [entries.get(key) for key in keys]
        places = _interpolated(self._points(request, known), len(keys), self._stride)
        parted_at, parted_depth = request.parted or (-1, 0)
        depths = []
        depth = 1
        for at, (place, entry) in enumerate(zip(places, known, strict=True)):
            own = int(place // size)
            if entry is not None:
                own = max(own, entry.lowest)
                if entry.request.is_told and not request.is_told:
                    own = entry.node.depth
            if at == parted_at:
                own = max(own, parted_depth)
            depth = max(depth, min(own, most))
            depths.append(depth)
        highest = most
        for at in range(len(keys) - 1, -1, -1):
            entry = known[at]
            if entry is not None:
                highest = min(highest, max(1, entry.highest))
            depths[at] = min(depths[at], highest)
        return depths

    def _points(self, request: Request, known: Sequence[_Entry | None]) -> list[tuple[float, float]]:
        """Return the known points (bytes, tokens) of this request's prefixes; both numbers increase.

        A crossing is a box that the line through the points has to meet. If the line misses the box, it is bent.
        """
        end = (request.size_bytes, request.tokens)
        points = [(0.0, 0.0)]
        for entry in known:
            if entry is not None and entry.end is not None and _is_between(points[-1], entry.end, end):
                points.append(entry.end)
        points.append(end)
        for at, entry in enumerate(known):
            if entry is not None and entry.parts_in is not None:
                self._bend(points, (at + 1) * self._stride, entry.parts_in * request.block_tokens, request.block_tokens)
        return points

    def _bend(self, points: list[tuple[float, float]], size: float, tokens: float, block_tokens: int) -> None:
        """Move the line into a box of one stride from `size` and one block from `tokens`, if the line misses the box.
        The line then goes through the middle of the box."""
        at = bisect_left(points, (size, -1.0))
        if not 0 < at < len(points) or points[at][0] <= size + self._stride:
            return
        before, after = points[at - 1], points[at]
        enters, leaves = _at(size, before, after), _at(size + self._stride, before, after)
        middle = (size + self._stride / 2, tokens + block_tokens / 2)
        if (enters >= tokens + block_tokens or leaves <= tokens) and _is_between(before, middle, after):
            points.insert(at, middle)


def _is_between(before: tuple[float, float], point: tuple[float, float], after: tuple[float, float]) -> bool:
    return before[0] < point[0] < after[0] and before[1] < point[1] < after[1]


def _at(size: float, before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return the tokens at `size` bytes on the line between two points."""
    return before[1] + (after[1] - before[1]) * (size - before[0]) / max(1e-9, after[0] - before[0])


def _interpolated(points: Sequence[tuple[float, float]], count: int, stride: int) -> list[float]:
    """Return the tokens up to the end of each of `count` strides."""
    places = []
    pieces = pairwise(points)
    before, after = next(pieces)
    for size in range(stride, (count + 1) * stride, stride):
        while size > after[0]:
            following = next(pieces, None)
            if following is None:
                break
            before, after = following
        places.append(_at(size, before, after))
    return places
