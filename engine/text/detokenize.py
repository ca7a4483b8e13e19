"""Incremental decoding: each token's text as soon as it is certain, and not before."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Tokens of one byte that a UTF-8 character may need; more of them pending are not a character."""
_WINDOW = 32
"""Tokens decoded at once where text stays uncertain, so that a token costs a constant time."""
_CONTEXT_SIZES = (4, 5, 6, 7, 8, 16, 64, 256)


def context_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[int, ...]:
    """The fewest last tokens of a prompt after which a `Detokenizer` decodes as after all of them.

    Empty where it needs none, where the prompt has no text, and where it may end within a character.
    """
    if tokenizer.joins_bytes:
        return ()
    for size in _CONTEXT_SIZES:
        tail = tuple(tokens[-size:])
        text = tokenizer.decode(tail)
        # One without text may be stripped of what follows; one that begins within a character may never be one.
        if text and not text.startswith(_REPLACEMENT):
            return () if text.endswith(_REPLACEMENT) else tail
        if size >= len(tokens):
            break
    return ()


class Detokenizer:
    """Joined, the returned pieces are what decoding all tokens at once gives.

    Exact for byte-level tokenizers. With sentencepiece's byte fallback it is exact for valid UTF-8 only: there one bad
    byte later makes the whole run of bytes undecodable, which is known after its first characters have been sent.

    With `context`, tokens that come before (`context_of`), they are what decoding all of it gives behind those: a
    decoder may strip the space at the beginning of a text, and here it does not begin.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _UTF8("replace") if tokenizer.joins_bytes else None
        self._window = list(context)
        """The tokens of the last piece, whose text the decoder needs as context, and those with text yet to come."""
        self._context = len(self._window)
        """Tokens of the last piece in `_window`."""
        self._sent = len(tokenizer.decode(self._window)) if self._window else 0
        """Characters of the decoded window that have been returned."""

    def push(self, token: int) -> str:
        """The text that `token` makes certain, often empty within a character."""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.decoded_bytes(token))
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = len(text.rstrip(_REPLACEMENT))
        if len(self._window) - self._context > _LONGEST_CHARACTER:
            certain = max(certain, len(text) - 1)
        piece = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(text) and piece:
            self._shrink_to(self._context)
        elif len(self._window) > _WINDOW:
            self._split(text)
        return piece

    def finish(self) -> str:
        """What is left, an incomplete character as U+FFFD. Nothing may be pushed afterwards."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._tokenizer.decode(self._window)[self._sent :]

    def _shrink_to(self, start: int) -> None:
        rest = self._tokenizer.decode(self._window[start:])
        if rest:  # tokens without text of their own are no context: a decoder may strip what comes first
            self._window = self._window[start:]
            self._context = len(self._window)
            self._sent = len(rest)

    def _split(self, text: str) -> None:
        for start in range(len(self._window) - _LONGEST_CHARACTER, len(self._window)):
            head = self._tokenizer.decode(self._window[:start])
            tail = self._tokenizer.decode(self._window[start:])
            if tail and head + tail == text:
                self._window = self._window[start:]
                self._context = 0
                self._sent = max(0, self._sent - len(head))
                return
