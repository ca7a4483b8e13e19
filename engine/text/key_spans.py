"""How many leading prompt tokens each prefix key of a request vouches for (DESIGN: README "Prefix keys").

A key covers the first (i + 1) * stride canonical bytes. Here those bytes are followed into the rendered prompt, by
searching for each message's content in order, and from there into tokens by the tokenizer's offsets.

What holds: for a template that only appends (the rendering of a conversation starts with the rendering of its
beginning), two requests with equal first (i + 1) * stride canonical bytes have equal rendered text over the tokens that
their i-th keys claim, as far as the shorter claim goes. Token ids over that text are equal too, but for the last few,
where what follows changes how a word is split. A template that does not append makes a claim wrong; the engine compares
token ids before it reuses anything, so that costs a misdirected request and never an answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.keys import FIELD_SEPARATOR, MESSAGE_END, PrefixKey, content_parts, message_parts, tools_bytes
from engine.sched.request import KeySpan


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text found in the prompt: `text` starts at byte `first_byte` of the canonical request, at `first_char` there."""

    first_byte: int
    first_char: int
    text: str

    @property
    def end_char(self) -> int:
        return self.first_char + len(self.text)


def chat_spans(
    keys: Sequence[PrefixKey],
    stride: int,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    prompt: str,
    token_ends: Sequence[int],
) -> tuple[KeySpan, ...]:
    """Spans of a chat request. `messages` and `tools` as the client sent them, `prompt` as rendered."""
    pieces, known_bytes = _locate(messages, tools, prompt)
    return _spans(keys[: known_bytes // stride], stride, pieces, token_ends)


def cached_prefixes(
    ends: Sequence[tuple[int, int]],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    prompt: str,
    token_ends: Sequence[int],
) -> tuple[int, ...]:
    """For each place (message, its content parts before the place) the leading prompt tokens that are certain by there.

    `ends` in ascending order. 0 parts: all before the message's content, tools among it. 0 tokens for a place that
    cannot be followed into the rendered prompt. Like a key's claim, a count leaves out a token that goes on beyond.
    """
    pieces, known_bytes = _locate(messages, tools, prompt)
    starts = _content_starts(messages, tools)
    places = [
        (message, starts[message] + sum(map(len, content_parts(messages[message].get("content"), message)[:parts])))
        for message, parts in ends
    ]
    chars = _covered_chars(pieces, [place for _, place in places])
    counts = []
    furthest = 0
    for (message, place), (_, parts), covered in zip(places, ends, chars, strict=True):
        if place > known_bytes or message >= len(pieces):
            counts.append(0)
            continue
        # In white space that the template strips from a content's beginning, a place is behind what comes before it.
        furthest = max(furthest, covered if parts else pieces[message].first_char)
        counts.append(bisect_right(token_ends, furthest) if furthest else 0)
    return tuple(counts)


def _content_starts(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[int]:
    """Where in the canonical bytes each message's content begins."""
    starts = []
    position = len(tools_bytes(tools)) if tools else 0
    for i, message in enumerate(messages):
        starts.append(position + len(str(message["role"]).encode()) + len(FIELD_SEPARATOR))
        position += sum(map(len, message_parts(message, i))) + len(MESSAGE_END)
    return starts


def text_spans(keys: Sequence[PrefixKey], stride: int, prompt: str, token_ends: Sequence[int]) -> tuple[KeySpan, ...]:
    """Spans of a text prompt, which is its own canonical form."""
    return _spans(keys, stride, [_Piece(0, 0, prompt)], token_ends)


def token_spans(keys: Sequence[PrefixKey], stride: int) -> tuple[KeySpan, ...]:
    """Spans of a prompt given as token ids: four bytes each."""
    return tuple(KeySpan(key, (i + 1) * stride // 4) for i, key in enumerate(keys))


def _locate(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, prompt: str
) -> tuple[list[_Piece], int]:
    """Each message's content in the prompt, and the canonical bytes up to the first that is not there."""
    pieces: list[_Piece] = []
    position = len(tools_bytes(tools)) if tools else 0
    cursor = 0
    for i, message in enumerate(messages):
        head = position + len(str(message["role"]).encode()) + len(FIELD_SEPARATOR)
        content = b"".join(content_parts(message.get("content"), i)).decode()
        piece = _find(content, prompt, cursor, head)
        if piece is None:
            return _before_moved(pieces, content, prompt), head
        pieces.append(piece)
        cursor = piece.end_char
        position += sum(map(len, message_parts(message, i))) + len(MESSAGE_END)
    return pieces, position


def _find(content: str, prompt: str, cursor: int, first_byte: int) -> _Piece | None:
    start = prompt.find(content, cursor)
    if start >= 0:
        return _Piece(first_byte, start, content)
    stripped = content.strip()  # many templates do
    start = prompt.find(stripped, cursor)
    if start < 0:
        return None
    leading = content[: len(content) - len(content.lstrip())]
    return _Piece(first_byte + len(leading.encode()), start, stripped)


def _before_moved(pieces: list[_Piece], content: str, prompt: str) -> list[_Piece]:
    """The pieces that end before `content`, which is not behind them: they may have been moved after it."""
    start = prompt.find(content.strip())
    return pieces if start < 0 else [piece for piece in pieces if piece.end_char <= start]


def _spans(
    keys: Sequence[PrefixKey], stride: int, pieces: Sequence[_Piece], token_ends: Sequence[int]
) -> tuple[KeySpan, ...]:
    chars = _covered_chars(pieces, [(i + 1) * stride for i in range(len(keys))])
    return tuple(
        KeySpan(key, bisect_right(token_ends, covered) if covered else 0)
        for key, covered in zip(keys, chars, strict=True)
    )


def _covered_chars(pieces: Sequence[_Piece], boundaries: Sequence[int]) -> Iterator[int]:
    """Characters of the prompt known from the bytes before each boundary (ascending): whole ones of a piece's text."""
    remaining = list(reversed(boundaries))
    covered = 0
    for piece in pieces:
        while remaining and remaining[-1] < piece.first_byte:
            yield covered
            remaining.pop()
        data = piece.text.encode()
        taken, covered = 0, piece.first_char
        while remaining and remaining[-1] <= piece.first_byte + len(data):
            # A boundary inside a character leaves its first bytes for the next round.
            part = data[taken : remaining.pop() - piece.first_byte].decode(errors="ignore")
            taken += len(part.encode())
            covered += len(part)
            yield covered
        covered = piece.end_char
    yield from (covered for _ in remaining)
