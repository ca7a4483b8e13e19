"""What a stream has told its client so far: kept unread while all goes well, read when its pod breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from engine.contract.requests import Endpoint
from engine.contract.sse import SseDecoder

FOLD_BYTES = 2**14
"""So many bytes of events are kept as they came; then what they say is read (about 0.1 ms), and they are dropped."""
MAX_TEXT_BYTES = 2**18
"""Longest text of an answer that is kept."""
RESERVE_BYTES = 2**12
"""Room is asked for in steps of this, not for every chunk."""
_CHUNK_BYTES = 48
"""Of memory that a chunk takes beside its own bytes: the object's header, and its place in a list."""
_HEAD = ("id", "created", "model")
"""Fields of every event that tell one answer from another."""


class Said:
    """The events of one answer, read. `obstacle` names what makes it impossible to have the rest from elsewhere."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._is_chat = endpoint is Endpoint.CHAT
        self._pieces: list[str] = []
        self.text_bytes = 0
        self.head: dict[str, Any] = {}
        self.has_role = False
        self.made = 0
        """Tokens: as the last `usage` has it, and one for each event with text since. An engine that puts several into
        an event and tells no usage in it has made more."""
        self.prompt_tokens: int | None = None
        """As the last `usage` has it."""
        self.finish: str | None = None
        self.has_usage = False
        """The account at the end was given."""
        self.is_done = False
        self.is_full = False
        """An engine says that the answer has all the tokens that it may have."""
        self.obstacle = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said that an answer made anew might contradict."""
        return not (self._pieces or self.made or self.finish or self.obstacle or self.has_usage)

    def read(self, data: bytes) -> None:
        """The data of one more event."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = orjson.loads(data)
            if not self.head:
                self.head = {name: event[name] for name in _HEAD if name in event}
            choices = event.get("choices") or ()
            for choice in choices:
                self._choice(choice)
            usage = event.get("usage")
            if usage:
                self.made, self.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
                self.has_usage |= not choices
        except (AttributeError, KeyError, TypeError, ValueError):
            self.obstacle = "an event that is not one of the API"

    def _choice(self, choice: Mapping[str, Any]) -> None:
        if choice.get("index"):
            self.obstacle = "several choices"
        if choice.get("logprobs"):
            self.obstacle = "log-probabilities"
        finish, has_role = choice.get("finish_reason"), False
        if self._is_chat:
            delta = choice.get("delta") or {}
            piece = delta.get("content")
            if len(delta) > 1 or piece is None:
                has_role = "role" in delta
                for name, value in delta.items():
                    if value and name not in ("role", "content"):
                        self.obstacle = name
        else:
            piece = choice.get("text")
        if piece:
            self._pieces.append(piece)
            self.text_bytes += len(piece.encode())  # no text has no `encode`
        self.made += bool(piece) or (piece is not None and not has_role and not finish)
        if finish or has_role:
            self.has_role |= has_role
            self.finish = finish or self.finish


class Record:
    """Keeps what a client was sent of a stream, within bounds; once those are exceeded, nothing more."""

    __slots__ = ("_chunks", "_decoder", "_keep", "_more_at", "_reserved", "_said", "_size", "is_kept")

    def __init__(self, endpoint: Endpoint, keep: Callable[[int], bool]) -> None:
        """`keep` is asked for room for so many bytes more."""
        self._keep = keep
        self._chunks: list[bytes] = []
        self._size = 0
        """Memory that they take."""
        self._reserved = self._more_at = 0
        self._decoder = SseDecoder(MAX_TEXT_BYTES)
        self._said = Said(endpoint)
        self.is_kept = True
        """False: it was too much, and nothing is left of it."""

    def add(self, chunk: bytes) -> None:
        """The client was sent `chunk`: whole events, or a part of one that is too long to wait for."""
        self._chunks.append(chunk)
        self._size += len(chunk) + _CHUNK_BYTES
        if self._size > self._more_at:
            self._more()

    def _more(self) -> None:
        if not self.is_kept:
            self._drop()
            return
        if self._size > FOLD_BYTES:
            self._fold()
        wanted = self._size + self._said.text_bytes
        while self.is_kept and self._reserved < wanted:
            self.is_kept = self._said.text_bytes <= MAX_TEXT_BYTES and self._keep(RESERVE_BYTES)
            self._reserved += RESERVE_BYTES
        self._more_at = min(FOLD_BYTES, self._reserved - self._said.text_bytes)
        if not self.is_kept:
            self._drop()

    def _fold(self) -> None:
        try:
            for data in self._decoder.feed(b"".join(self._chunks)):
                self._said.read(data)
        except ValueError:  # an event without an end
            self.is_kept = False
        self._chunks.clear()
        self._size = 0

    def _drop(self) -> None:
        self._chunks.clear()
        self._size = self._more_at = 0

    def read(self) -> Said:
        """What was said in all that was added."""
        self._fold()
        return self._said
