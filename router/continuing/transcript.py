"""What a client was sent of a stream, and what it says: kept unparsed while all goes well, parsed if the stream breaks.

`SentEvents` keeps the events, within bounds. A `Transcript` is the state of the answer that the events give; each API
with named events has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from engine.common.sse import DONE_DATA, SseDecoder
from engine.contract.bounded_json import loads
from engine.contract.requests import Endpoint

FOLD_BYTES = 2**14
"""Bytes of events that are kept as they came. Beyond this they are parsed (about 0.1 ms) and dropped."""
MAX_TEXT_BYTES = 2**18
"""Longest text of an answer that is kept, in bytes."""
RESERVE_BYTES = 2**12
"""Memory is reserved in steps of this many bytes, not for every chunk."""
_CHUNK_BYTES = 48
"""Memory of a chunk besides its own bytes: the object's header, and its place in a list."""
BEGINNINGS = ("response.created", "response.in_progress", "response.queued")
PLACE = ("item_id", "output_index", "content_index")
ENDS = ("response.completed", "response.incomplete")
_HEAD = ("id", "created", "model")
"""Fields of every event that identify the answer."""


class Transcript:
    """The state of one answer, from its events. `obstacle` names what makes it impossible to get the rest elsewhere."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._is_chat = endpoint is Endpoint.CHAT
        self._text = bytearray()
        """The text so far, in UTF-8. A list of pieces would take ten times the memory that is counted for it."""
        self.text_bytes = 0
        self.head: dict[str, Any] = {}
        self.has_role = False
        self.made = 0
        """Tokens so far: those of the last `usage`, and one for each event with text since. If an engine puts several
        tokens into an event without a `usage`, there are more."""
        self.prompt_tokens: int | None = None
        """Prompt tokens in the last `usage`."""
        self.finish: str | None = None
        self.has_usage = False
        """Whether the usage at the end has come."""
        self.is_done = False
        self.is_full = False
        """Whether an engine says that the answer has all the tokens that it may have."""
        self.obstacle = ""

        self.is_closed = False
        """Whether an event said that the text has ended, though perhaps not why."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._text.decode()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sent that a new answer might contradict."""
        return not (self._text or self.made or self.finish or self.obstacle or self.has_usage or self.is_closed)

    def read(self, data: bytes) -> None:
        """Read the data of one more event."""
        if data == DONE_DATA:
            self.is_done = True
            return
        try:
            self._event(loads(data))
        except (AttributeError, KeyError, TypeError, ValueError):
            self.obstacle = "an event that is not one of the API"

    def _event(self, event: dict[str, Any]) -> None:
        """Read one event. Raises AttributeError, KeyError, TypeError or ValueError if it does not fit the API."""
        if not self.head:
            self.head = {name: event[name] for name in _HEAD if name in event}
        choices = event.get("choices") or ()
        for choice in choices:
            self._choice(choice)
        usage = event.get("usage")
        if usage:
            self.made, self.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
            self.has_usage |= not choices

    def _piece(self, text: str) -> None:
        """Add a piece of text, which counts as one token."""
        encoded = text.encode()  # raises AttributeError if it is no text
        self._text += encoded
        self.text_bytes += len(encoded)
        self.made += 1

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
            self._piece(piece)
        elif piece is not None and not has_role and not finish:
            self.made += 1
        if finish or has_role:
            self.has_role |= has_role
            self.finish = finish or self.finish


class MessageTranscript(Transcript):
    """The state of one message with one block of text. With any other block, no other pod can give the rest."""

    def __init__(self, endpoint: Endpoint = Endpoint.MESSAGES) -> None:
        super().__init__(endpoint)
        self.is_open = False
        """Whether the block has begun."""
        self.begun_usage: dict[str, Any] = {}
        """The usage in the first event, with the prompt's tokens."""

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] != "text_delta":
                self.obstacle = str(delta["type"])
            elif delta["text"]:
                self._piece(delta["text"])
        elif kind == "message_start":
            message = event["message"]
            self.head = {"id": message["id"]}
            self.begun_usage = dict(message.get("usage") or {})
        elif kind == "content_block_start":
            if self.is_open or event["content_block"]["type"] != "text":
                self.obstacle = "several blocks" if self.is_open else str(event["content_block"]["type"])
            self.is_open = True
        elif kind == "content_block_stop":
            self.is_closed = True
        elif kind == "message_delta":
            self.finish = event["delta"].get("stop_reason") or self.finish
            if usage := event.get("usage"):
                self.made, self.has_usage = int(usage["output_tokens"]), True
        elif kind == "message_stop":
            self.is_done = True
        elif kind != "ping":
            raise ValueError(kind)


class ResponseTranscript(Transcript):
    """The state of one response with one message with one part of text. With any other item or part, no other pod can
    give the rest."""

    def __init__(self, endpoint: Endpoint = Endpoint.RESPONSES) -> None:
        super().__init__(endpoint)
        self.response: dict[str, Any] = {}
        """The response in the first event."""
        self.item: dict[str, Any] = {}
        """The message, as it began."""
        self.place: dict[str, Any] = {}
        """The fields with which events locate the text: `item_id`, `output_index`, `content_index`."""
        self.has_part = False
        """Whether the part of text has begun."""
        self.number = -1
        """`sequence_number` of the last event."""
        self.done: set[str] = set()
        """Types of the events that reported an end."""

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.number = int(event["sequence_number"])
        if kind == "response.output_text.delta":
            if event.get("logprobs"):
                self.obstacle = "log-probabilities"
            self.place = {name: event[name] for name in PLACE}
            if event["delta"]:
                self._piece(event["delta"])
        elif kind in BEGINNINGS:
            if not self.response:
                self.response = event["response"]
                self.head = {"id": self.response["id"], "created_at": self.response["created_at"]}
                self.text_bytes += len(orjson.dumps(self.response))
        elif kind == "response.output_item.added":
            if self.item or event["item"]["type"] != "message":
                self.obstacle = "several items" if self.item else str(event["item"]["type"])
            self.item = event["item"]
            self.place = {"item_id": self.item["id"], "output_index": event["output_index"], "content_index": 0}
        elif kind == "response.content_part.added":
            if self.has_part or event["part"]["type"] != "output_text":
                self.obstacle = "several parts" if self.has_part else str(event["part"]["type"])
            self.has_part = True
        elif kind in ("response.output_text.done", "response.content_part.done", "response.output_item.done"):
            self.is_closed = True
            self.done.add(kind)
        elif kind in ENDS:
            self.is_done = True
        else:
            raise ValueError(kind)


_TRANSCRIPTS = {Endpoint.MESSAGES: MessageTranscript, Endpoint.RESPONSES: ResponseTranscript}


def empty_transcript(endpoint: Endpoint) -> Transcript:
    """Return the empty state of an answer of that endpoint."""
    return _TRANSCRIPTS.get(endpoint, Transcript)(endpoint)


class SentEvents:
    """Keeps what a client was sent of a stream, within bounds. Once it exceeds them, nothing is kept."""

    __slots__ = (
        "_chunks",
        "_decoder",
        "_endpoint",
        "_keep",
        "_more_at",
        "_reserved",
        "_size",
        "_transcript",
        "is_kept",
    )

    def __init__(self, endpoint: Endpoint, keep: Callable[[int], bool]) -> None:
        """`keep` reserves the given bytes, or returns False."""
        self._keep = keep
        self._chunks: list[bytes] = []
        self._size = 0
        """Bytes of memory that the chunks take."""
        self._reserved = self._more_at = 0
        self._endpoint = endpoint
        self._decoder: SseDecoder | None = None
        self._transcript: Transcript | None = None
        """Made with the decoder when something has to be parsed, which most answers never need."""
        self.is_kept = True
        """False if the stream exceeded the bounds, so nothing of it is kept."""

    def add(self, chunk: bytes) -> None:
        """Add a `chunk` that the client was sent: whole events, or a part of an event too long to hold back."""
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
        text_bytes = 0 if self._transcript is None else self._transcript.text_bytes
        wanted = self._size + text_bytes
        while self.is_kept and self._reserved < wanted:
            self.is_kept = text_bytes <= MAX_TEXT_BYTES and self._keep(RESERVE_BYTES)
            self._reserved += RESERVE_BYTES
        self._more_at = min(FOLD_BYTES, self._reserved - text_bytes)
        if not self.is_kept:
            self._drop()

    def _fold(self) -> Transcript:
        if self._transcript is None or self._decoder is None:
            self._transcript, self._decoder = empty_transcript(self._endpoint), SseDecoder(MAX_TEXT_BYTES)
        try:
            for data in self._decoder.feed(b"".join(self._chunks)):
                self._transcript.read(data)
        except ValueError:  # an event without an end
            self.is_kept = False
        self._chunks.clear()
        self._size = 0
        return self._transcript

    def _drop(self) -> None:
        self._chunks.clear()
        self._size = self._more_at = 0

    def read(self) -> Transcript:
        """Parse all that was added and return the state of the answer."""
        return self._fold()
