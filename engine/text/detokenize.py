"""Incremental decoding: gives each token's text as soon as the text is certain, and not before."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

from engine.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""The most one-byte tokens that a UTF-8 character needs. If more are pending, they are not a character."""
_WINDOW = 32
"""The most tokens decoded at once while text stays uncertain. The bound keeps the time for a token constant."""
_CONTEXT_SIZES = (4, 5, 6, 7, 8, 16, 64, 256)


def context_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the fewest last tokens of a prompt after which a `Detokenizer` decodes as after the whole prompt.

    Empty if it needs none, if the prompt has no text, or if the prompt may end within a character.
    """
    if tokenizer.joins_bytes:
        return ()
    for size in _CONTEXT_SIZES:
        tail = tuple(tokens[-size:])
        text = tokenizer.decode(tail)
        # After a tail without text the decoder may strip a space. A tail may also begin within a character.
        if text and not text.startswith(_REPLACEMENT):
            return () if text.endswith(_REPLACEMENT) else tail
        if size >= len(tokens):
            break
    return ()


class Detokenizer:
    """Decodes tokens one by one. The joined pieces equal the text of all tokens decoded at once.

    This is exact for byte-level tokenizers. With sentencepiece's byte fallback it is exact for valid UTF-8 only: a bad
    byte makes the whole run of bytes undecodable, even characters before it that have been sent.

    `context`: the tokens before the first one (`context_of`). A decoder may strip the space at the beginning of a text;
    with context the text does not begin here, so the space stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        shows_special: bool = False,
        shown: Set[int] = frozenset(),
    ) -> None:
        """`shows_special`: whether the text has special tokens. `shown`: the only ones that it has otherwise."""
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._shown = frozenset() if shows_special else shown
        self._bytes_of = tokenizer.shown_bytes if shows_special else tokenizer.decoded_bytes
        self._utf8 = _UTF8("replace") if tokenizer.joins_bytes else None
        self._window = list(context)
        """The tokens of the last piece, which the decoder needs as context, and the tokens whose text is pending."""
        self._context = len(self._window)
        """Tokens of the last piece in `_window`."""
        self._sent = len(self._decode(self._window)) if self._window else 0
        """Characters of the decoded window that have been returned."""

    def push(self, token: int) -> str:
        """Return the text that `token` makes certain. It is often empty within a character."""
        if token in self._shown:
            return self._show(token)
        if self._utf8 is not None:
            return self._utf8.decode(self._bytes_of(token))
        self._window.append(token)
        text = self._decode(self._window)
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

    def _show(self, token: int) -> str:
        """Return the text of a special token, after the text that was pending."""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.shown_bytes(token))
        text = self._decode(self._window)
        pending, self._sent = text[self._sent :], max(self._sent, len(text))
        return pending + self._tokenizer.token_text(token)

    def finish(self) -> str:
        """Return the rest, with an incomplete character as U+FFFD. Push nothing afterwards."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._decode(self._window)[self._sent :]

    def _shrink_to(self, start: int) -> None:
        rest = self._decode(self._window[start:])
        if rest:  # tokens without text are no context: a decoder may strip the space after them
            self._window = self._window[start:]
            self._context = len(self._window)
            self._sent = len(rest)

    def _split(self, text: str) -> None:
        for start in range(len(self._window) - _LONGEST_CHARACTER, len(self._window)):
            head = self._decode(self._window[:start])
            tail = self._decode(self._window[start:])
            if tail and head + tail == text:
                self._window = self._window[start:]
                self._context = 0
                self._sent = max(0, self._sent - len(head))
                return

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=not self._shows_special)
