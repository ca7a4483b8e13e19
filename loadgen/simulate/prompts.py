"""Prompts as token ids: what a tokenizer would make of a text, without the text.

A token is 4 bytes of canonical text. So prefix keys are made as for prompts of token ids, and each covers exactly
`stride / 4` tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.contract.keys import PrefixKey, prefix_keys
from engine.sched.request import KeySpan
from loadgen.workloads.base import Piece, Session, conversation

TOKEN_BYTES = 4
_ID_BITS = 0x7FFFFFFF
_CACHED_TOKENS = 16 * 2**20
_CACHED_SPANS = 2**18


@dataclass(slots=True, eq=False)
class MadePrompt:
    """One request's prompt."""

    tokens: array[int]
    """int32."""
    keys: tuple[PrefixKey, ...]
    user_start: int
    """Index of the first token of the first user message."""


class PromptMaker:
    """Makes token ids of prompts: equal pieces have equal ids. The most recently used pieces are cached."""

    def __init__(self, seed: int, stride_bytes: int) -> None:
        self._seed = seed
        self._stride_bytes = stride_bytes
        self._pieces: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._cached_tokens = 0

    def prompt(self, session: Session, turn: int, answers: Mapping[int, Sequence[int]]) -> MadePrompt:
        """Return the prompt of a turn; `answers`: token ids by turn, for the turns it follows."""
        parts: list[bytes] = []
        user_start: int | None = None
        for step in conversation(session, turn):
            for message in session.turns[step].messages:
                if message.role == "user" and user_start is None:
                    user_start = sum(map(len, parts)) // TOKEN_BYTES
                parts += [self._ids(piece) for piece in message.pieces]
            if step != turn:
                parts.append(array("i", answers[step]).tobytes())
        data = b"".join(parts)
        tokens = array("i")
        tokens.frombytes(data)
        return MadePrompt(tokens, prefix_keys(data, self._seed, self._stride_bytes), user_start or 0)

    def _ids(self, piece: Piece) -> bytes:
        name = (piece.key if piece.text is None else piece.text, piece.style, piece.tokens)
        found = self._pieces.get(name)
        if found is not None:
            self._pieces.move_to_end(name)
            return found
        first = xxh3_64_intdigest(f"{piece.style}/{name[0]}".encode())
        # A shorter piece with the same key is a prefix of a longer one: ids count up from a start given by the key.
        ids = ((first + np.arange(piece.tokens, dtype=np.uint64)) & _ID_BITS).astype("<i4").tobytes()
        self._keep(name, ids)
        return ids

    def _keep(self, name: tuple[str, str, int], ids: bytes) -> None:
        self._pieces[name] = ids
        self._cached_tokens += name[2]
        while self._cached_tokens > _CACHED_TOKENS:
            (_, _, tokens), _ = self._pieces.popitem(last=False)
            self._cached_tokens -= tokens


class SharedSpans:
    """Makes prefix keys into an engine's spans. A key always ends at the same token, so prompts can share its span."""

    def __init__(self, stride_bytes: int) -> None:
        self._key_tokens = stride_bytes // TOKEN_BYTES
        self._spans: dict[PrefixKey, KeySpan] = {}

    def of(self, keys: Sequence[PrefixKey]) -> tuple[KeySpan, ...]:
        """Return one span for each key, shortest prefix first."""
        spans = self._spans
        if len(spans) > _CACHED_SPANS:
            spans.clear()
        found = [spans.get(key) for key in keys]
        return tuple([span or self._make(keys[i], i) for i, span in enumerate(found)])

    def _make(self, key: PrefixKey, place: int) -> KeySpan:
        span = self._spans[key] = KeySpan(key, (place + 1) * self._key_tokens)
        return span
