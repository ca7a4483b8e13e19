"""Tokens of texts that came before, so that what prompts have in common is tokenized once.

If the KV of a long prompt is cached, tokenizing takes longer than all else: 1 ms for 4 to 7 KB. The cache keeps pieces
of prompts: a piece is a chat's text from one special token to the next. Long pieces are cut in chunks of about 1,000
characters, if the tokenizer is a byte-level one with a known regular expression (`cuts.py`).
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from engine.text.ends import JoinedEnds
from engine.text.tokenizer import Encoded, Tokenizer

LEAST_CHARS = 256
"""Shorter pieces are tokenized each time: that costs about as much as a look-up and a call of the library."""
SEEN_ONCE = 2**16
"""Most pieces that are remembered after their first use. A piece is kept from its second use on, so texts that are used
once take no room."""
_OVERHEAD_BYTES = 400
"""Memory of an entry beside its text and its tokens."""


@dataclass(frozen=True, slots=True)
class _Kept:
    ids: array[int]
    ends: array[int]
    bytes: int


class TokenCache:
    """Thread-safe. Texts with different salts share nothing: otherwise a client could tell from the time of its request
    whether another client has sent the same text. The least recently used pieces are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_around()
        self._space_chars = 0
        """Length of the space that is left out of the offsets of a token which begins with it: 0 or 1."""
        if tokenizer.cuts.between_words:
            self._space_chars = tokenizer.encode("a a", add_special_tokens=False).ends[0] - 1
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self.bytes = 0
        """Memory of the pieces that are kept."""
        self.hit_chars = 0
        """Characters whose tokens were in the cache, of all texts."""

    def encode(self, text: str, salt: str, *, add_special_tokens: bool) -> Encoded:
        """Return what `Tokenizer.encode` returns for the text."""
        before, after = (self._added or ((), ())) if add_special_tokens else ((), ())
        parts = self._parts(text, salt) if self._added is not None or not add_special_tokens else []
        if all(part.kept is None and not part.keep for part in parts):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids, ends = list(before), JoinedEnds(len(text), len(before), len(after))
        for part in parts:
            kept = part.kept
            space_chars = self._space_chars if text[part.start] == " " else 0
            if kept is None:
                piece = text[part.start : part.stop]
                encoded = self._tokenizer.encode(piece, add_special_tokens=False)
                ids.extend(encoded.ids)
                ends.add(encoded.ends, part.start, space_chars)
                if part.keep:
                    self._keep(salt, piece, encoded)
            else:
                ids.extend(kept.ids)
                ends.add(kept.ends, part.start, space_chars)
        ids.extend(after)
        return Encoded(ids, ends)

    def clear(self) -> None:
        """Drop all that is kept."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()
            self.bytes = 0

    def _parts(self, text: str, salt: str) -> list[_Part]:
        """Return the parts of the text in order: pieces that are kept or will be, and the text between them."""
        if not self._max_bytes or len(text) < LEAST_CHARS:
            return []
        starts = self._tokenizer.cuts.starts(text)
        parts = list[_Part]()
        rest = 0
        for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
            if stop - start < LEAST_CHARS:
                continue
            key = (salt, text[start:stop])
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    self.hit_chars += stop - start
                elif not self._was_seen(hash(key)):
                    continue
            if rest < start:
                parts.append(_Part(rest, start))
            parts.append(_Part(start, stop, kept, keep=kept is None))
            rest = stop
        if rest < len(text):
            parts.append(_Part(rest, len(text)))
        return parts

    def _was_seen(self, key: int) -> bool:
        if key in self._seen:
            del self._seen[key]
            return True
        self._seen[key] = None
        if len(self._seen) > SEEN_ONCE:
            self._seen.popitem(last=False)
        return False

    def _keep(self, salt: str, piece: str, encoded: Encoded) -> None:
        ids, ends = array("I", encoded.ids), array("I", encoded.ends[:])
        size = sys.getsizeof(piece) + sys.getsizeof(salt) + sys.getsizeof(ids) + sys.getsizeof(ends) + _OVERHEAD_BYTES
        if size > self._max_bytes:
            return
        with self._lock:
            before = self._kept.pop((salt, piece), None)
            self.bytes += size - (before.bytes if before is not None else 0)
            self._kept[salt, piece] = _Kept(ids, ends, size)
            while self.bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= dropped.bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """The characters `start` .. `stop - 1` of a text."""

    start: int
    stop: int
    kept: _Kept | None = None
    """Its tokens, if they are in the cache."""
    keep: bool = False
    """Whether its tokens are to be kept."""
