"""Continuations: the ways to ask an engine for the rest of an answer, in any API.

| continuation | engines | what they are sent |
|---|---|---|
| ANEW | any | the original request, since the client has no text yet |
| SO_FAR | ours: the model card accepts `answer_so_far` | the request, and the text in that field |
| PROMPT | any, for `/v1/completions` with one text | the prompt and the text as the prompt |
| MESSAGE | vLLM; SGLang for chats | the text as the last message, which is to be continued |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from engine.common.sse import DONE, DONE_DATA, SseDecoder
from engine.contract.bounded_json import loads
from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from router.continuing.transcript import Transcript

Json = dict[str, Any]
COUNTS_OUTPUT = ("presence_penalty", "frequency_penalty")
"""Fields that apply to generated tokens, not to the prompt, so the text so far must count as generated."""
CONSTRAINTS: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "text": ({}, {"format": {"type": "text"}}),
    "output_config": ({},),
    "output_format": (),
}
"""Fields by which the whole answer follows a schema or a grammar, with the values that ask for nothing. The text so far
must count as generated, as for COUNTS_OUTPUT."""
_THOUGHTS = ("<think>", "</think>")
"""Chat templates split a message at these marks."""


def needs_so_far(fields: Mapping[str, Any]) -> bool:
    """Whether only an engine that counts the text so far as generated can give the rest."""
    return any(fields.get(name) for name in COUNTS_OUTPUT) or any(
        (value := fields.get(name)) is not None and value not in neutral for name, neutral in CONSTRAINTS.items()
    )


class Continuation(Enum):
    """A way to give an engine the text so far. The first way that an engine supports is used."""

    ANEW = auto()
    SO_FAR = auto()
    PROMPT = auto()
    MESSAGE = auto()


class Rewriter(Protocol):
    """Turns the events of the rest into events of the answer that the client has begun to read."""

    def feed(self, chunk: bytes) -> bytes:
        """Return the events that `chunk` completes, rewritten. Raises ValueError for an event that never ends."""
        ...


class EventRewriter(ABC):
    """A Rewriter that reads each event."""

    def __init__(self) -> None:
        self._decoder = SseDecoder()

    def feed(self, chunk: bytes) -> bytes:
        """See Rewriter. Also raises ValueError for an event that does not fit the API."""
        return b"".join([self._rewritten(data) for data in self._decoder.feed(chunk)])

    def _rewritten(self, data: bytes) -> bytes:
        if data == DONE_DATA:
            return self._done()
        try:
            return self._event(loads(data), data)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError("the rest of the stream has an event that does not fit the API") from None

    def _done(self) -> bytes:
        """Return what replaces `[DONE]`, which some engines also send in APIs that do not have it."""
        return DONE

    @abstractmethod
    def _event(self, event: Json, data: bytes) -> bytes:
        """Return what replaces one event; `data`: the event as it came.

        Raises AttributeError, KeyError, TypeError or ValueError for an event that does not fit the API.
        """


class Api(Protocol):
    """The steps of resuming that depend on the answer's API. `fields`: the request."""

    @property
    def free(self) -> frozenset[str]:
        """Fields that mean the same in the request for the rest as in the original one."""
        ...

    @property
    def only(self) -> Mapping[str, tuple[Any, ...]]:
        """Fields, with the values for which another pod can give the rest; null is always allowed."""
        ...

    @property
    def stop(self) -> str:
        """The field with the stop strings."""
        ...

    def continuation_of(
        self, card: Mapping[str, Any], fields: Mapping[str, Any], transcript: Transcript
    ) -> Continuation | None:
        """Return how to give a text that is not empty to the engine with this model card; None if there is none."""
        ...

    def path(self, continuation: Continuation) -> Endpoint:
        """Return the endpoint that is asked for the rest."""
        ...

    def asked(self, fields: Mapping[str, Any], transcript: Transcript, continuation: Continuation) -> Json:
        """Return the request for the rest, for any continuation except ANEW."""
        ...

    def ending(self, fields: Mapping[str, Any], transcript: Transcript, prompt_tokens: int | None) -> bytes | None:
        """Return the missing events if all tokens have been generated; None if some have not, or if it is not known.
        `prompt_tokens`: those of the request, if known."""
        ...

    def rewriter(self, transcript: Transcript, continuation: Continuation, prompt_tokens: int | None) -> Rewriter:
        """Return the rewriter of the engine's answer to `asked`."""
        ...


def takes_so_far(card: Mapping[str, Any]) -> bool:
    """Whether the engine with this model card continues a text in the field ANSWER_SO_FAR."""
    accepts = card.get("accepts")
    return isinstance(accepts, list) and ANSWER_SO_FAR in accepts


def is_rendered_as_is(text: str) -> bool:
    """Whether chat templates render this message unchanged: many trim messages, and some move thoughts."""
    return text == text.strip() and not any(mark in text for mark in _THOUGHTS)


def with_less(fields: Json, limits: Sequence[str], made: int) -> Json:
    """Return `fields` with each limit of the answer's length reduced by `made` tokens."""
    for name in limits:
        if type(tokens := fields.get(name)) is int:
            fields[name] = max(0 if name == "min_tokens" else 1, tokens - made)
    return fields


def own_counts(prompt: int | None, told: int, generated: int, made: int) -> tuple[int, int]:
    """Return the tokens of the prompt and of the answer, if the engine counted `made` of the answer's tokens as
    part of the prompt.

    `prompt`: tokens of the prompt, if known. `told` and `generated`: the engine's counts, whose sum stays the same.
    """
    own = max(0, told - made) if prompt is None else min(prompt, told)
    return own, told + generated - own
