"""Where the tokens of a text end, when its pieces were tokenized on their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import overload


class JoinedEnds(Sequence[int]):
    """The ends of consecutive pieces of a text.

    A token's end is the start of the token after it, if that is later than the token's own end
    (`tokenizer.Encoded.ends`). So the end of a piece's last token depends on the next piece. If the text itself has no
    tokens, those around it come from none of it.
    """

    def __init__(self, chars: int, added_before: int = 0, added_after: int = 0) -> None:
        """`chars`: length of the text. `added_before`, `added_after`: tokens around the text, which come from no part
        of it."""
        self._chars = chars
        self._before = added_before
        self._after = added_after
        self._pieces: list[Sequence[int]] = []
        self._first_tokens: list[int] = []
        self._first_chars: list[int] = []
        self._starts: list[int] = []
        """Where the first token of each piece starts."""
        self._length = 0

    def add(self, ends: Sequence[int], first_char: int, start: int) -> None:
        """Add the next piece, which begins at character `first_char`; its first token starts `start` characters
        later."""
        if ends:
            self._pieces.append(ends)
            self._first_tokens.append(self._length)
            self._first_chars.append(first_char)
            self._starts.append(first_char + start)
            self._length += len(ends)

    def within(self, chars: int) -> int:
        """Return how many tokens come only from the text's first `chars` characters."""
        if chars >= self._chars or not self._length:
            return len(self)
        piece = bisect_right(self._starts, chars) - 1
        if piece < 0:
            return self._before
        first_token = self._first_tokens[piece]
        count = first_token + bisect_right(self._pieces[piece], chars - self._first_chars[piece])
        is_last = piece + 1 == len(self._pieces)
        # The last token of a piece ends where the next piece's first token starts, which is after `chars`.
        return self._before + (count if is_last else min(count, first_token + len(self._pieces[piece]) - 1))

    def __len__(self) -> int:
        return self._before + self._length + self._after

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index] - self._before
        if not 0 <= i < self._length:
            return 0 if i < 0 or not self._length else self._chars
        piece = bisect_right(self._first_tokens, i) - 1
        if piece + 1 < len(self._pieces) and i + 1 == self._first_tokens[piece + 1]:
            return self._starts[piece + 1]
        return self._first_chars[piece] + self._pieces[piece][i - self._first_tokens[piece]]


def tokens_within(ends: Sequence[int], chars: int) -> int:
    """Return how many tokens come only from the text's first `chars` characters. `ends` never decreases."""
    return ends.within(chars) if isinstance(ends, JoinedEnds) else bisect_right(ends, chars)
