"""The state of an answer so far, read from the events of a stream of a chat or completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engine.common.sse import DONE_DATA
from engine.contract.requests import Endpoint

_HEAD = ("id", "created", "model")
"""Fields of every event that identify the answer."""


class Said:
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
        self.tells_finish = False
        """Whether the engine sends the field that will say why the answer ends."""
        self._has_begun = False
        """Whether an event was read."""
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

    @property
    def is_cut(self) -> bool:
        """Whether an answer that seems to end here was given up: it is empty, or lacks the finish reason though its
        engine gives one."""
        return not self.finish and (self.tells_finish or not self._has_begun)

    def read(self, data: bytes) -> None:
        """Read the data of one more event."""
        if data == DONE_DATA:
            self.is_done = True
            return
        self._has_begun = True
        try:
            self._event(orjson.loads(data))
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
        self.tells_finish |= "finish_reason" in choice
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


class NamedEventsSaid(Said):
    """The state of one answer in an API with named events: messages and responses."""

    @property
    def is_cut(self) -> bool:
        """See Said. Only an empty answer shows that it was given up (`cut_answers`)."""
        return self.is_empty and bool(self.head)
