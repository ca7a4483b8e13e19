"""Computes how many leading prompt tokens each prefix key of a request covers (see engine/contract/PREFIX_KEYS.md).

Key i covers the first (i + 1) * stride canonical bytes. This module finds those bytes in the rendered prompt, by
searching for each message's content in order, and maps them to tokens by the tokenizer's offsets.

Guarantee for a template that only appends (a conversation's text starts with the text of its beginning): if the first
(i + 1) * stride canonical bytes of two requests are equal, their rendered texts are equal over the tokens that both
i-th keys cover. The token ids over that text are equal too, except the last few, because later text can change how a
word is split. With a template that does not append, a key's number of tokens can be wrong. The engine compares token
ids before it reuses anything, so a wrong number misdirects a request and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.keys import FIELD_SEPARATOR, MESSAGE_END, PrefixKey, content_parts, message_parts, tools_bytes
from engine.sched.request import KeySpan
from engine.text.ends import tokens_within

THOUGHTS = ("thinking", "redacted_thinking")
"""Types of parts with reasoning, which templates render before the content or not at all."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text in the prompt: it starts at canonical byte `first_byte` and at the prompt's character `first_char`."""

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
    """Return the spans of a chat request. `messages` and `tools` are the client's; `prompt` is the rendered text."""
    pieces, known_bytes = _locate(messages, tools, prompt)
    return _spans(keys[: known_bytes // stride], stride, pieces, token_ends)


def cached_prefixes(
    ends: Sequence[tuple[int, int]],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    prompt: str,
    token_ends: Sequence[int],
) -> tuple[int, ...]:
    """Return the number of leading prompt tokens before each place (message, number of its content parts before the
    place).

    `ends` is in ascending order. 0 parts: the place before the message's content, with tools before it. The count is 0
    for a place that cannot be found in the rendered prompt. As in a key's span, a token that straddles the place is
    not counted.
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
        # If the template strips a content's leading white space, a place in it may come before the previous place.
        furthest = max(furthest, covered if parts else pieces[message].first_char)
        counts.append(tokens_within(token_ends, furthest) if furthest else 0)
    return tuple(counts)


def _content_starts(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[int]:
    """Return where each message's content begins in the canonical bytes."""
    starts = []
    position = len(tools_bytes(tools)) if tools else 0
    for i, message in enumerate(messages):
        starts.append(position + len(str(message["role"]).encode()) + len(FIELD_SEPARATOR))
        position += sum(map(len, message_parts(message, i))) + len(MESSAGE_END)
    return starts


def text_spans(keys: Sequence[PrefixKey], stride: int, prompt: str, token_ends: Sequence[int]) -> tuple[KeySpan, ...]:
    """Return the spans of a text prompt, which is its own canonical form."""
    return _spans(keys, stride, [_Piece(0, 0, prompt)], token_ends)


def token_spans(keys: Sequence[PrefixKey], stride: int) -> tuple[KeySpan, ...]:
    """Return the spans of a prompt given as token ids, which have four bytes each."""
    return tuple(KeySpan(key, (i + 1) * stride // 4) for i, key in enumerate(keys))


def _locate(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, prompt: str
) -> tuple[list[_Piece], int]:
    """Return each message's content in the prompt, and the canonical bytes up to the first content not found."""
    pieces: list[_Piece] = []
    position = len(tools_bytes(tools)) if tools else 0
    cursor = 0
    for i, message in enumerate(messages):
        head = position + len(str(message["role"]).encode()) + len(FIELD_SEPARATOR)
        thought, content = _content(message, i)
        piece = _find(content, prompt, cursor, head + thought)
        if piece is None:
            return _before_moved(pieces, content, prompt), head
        pieces.append(piece)
        cursor = piece.end_char
        position += sum(map(len, message_parts(message, i))) + len(MESSAGE_END)
    return pieces, position


def _content(message: Mapping[str, Any], i: int) -> tuple[int, str]:
    """Return the canonical bytes of the reasoning with which a content begins, and the text to look for."""
    given = message.get("content")
    parts = content_parts(given, i)
    thoughts = 0
    if isinstance(given, list):
        kinds = [part.get("type") in THOUGHTS for part in given]
        thoughts = kinds.index(False) if False in kinds else len(kinds)
        if any(kinds[thoughts:]):  # the text up to the next reasoning is enough to find the place
            parts = parts[: kinds.index(True, thoughts)]
    return sum(map(len, parts[:thoughts])), b"".join(parts[thoughts:]).decode()


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
    """Return the pieces that end before `content`. The template may have moved `content` ahead of the others."""
    start = prompt.find(content.strip())
    return pieces if start < 0 else [piece for piece in pieces if piece.end_char <= start]


def _spans(
    keys: Sequence[PrefixKey], stride: int, pieces: Sequence[_Piece], token_ends: Sequence[int]
) -> tuple[KeySpan, ...]:
    chars = _covered_chars(pieces, [(i + 1) * stride for i in range(len(keys))])
    return tuple(
        KeySpan(key, tokens_within(token_ends, covered) if covered else 0)
        for key, covered in zip(keys, chars, strict=True)
    )


def _covered_chars(pieces: Sequence[_Piece], boundaries: Sequence[int]) -> Iterator[int]:
    """Yield the number of prompt characters covered by the bytes before each boundary (ascending)."""
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
