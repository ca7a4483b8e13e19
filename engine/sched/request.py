"""A request as the scheduler and the backend see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.cache.sequence import CachedSequence
from engine.contract.prefix_key import PrefixKey
from engine.sched.masks import TokenMasks
from engine.sched.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended; STOP and LENGTH are the API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class KeySpan:
    """A prefix key and the number of leading prompt tokens that come only from the bytes it covers."""

    key: PrefixKey
    tokens: int


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A beginning of the prompt that the client asks to keep."""

    tokens: int
    """Leading prompt tokens."""
    lifetime_s: float
    """Seconds, counted from each use."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools."""

    may_be_called: bool
    """The answer may call a tool."""
    brings_result: bool
    """The last message is a tool's result: the conversation goes on where a tool was called."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. The scheduler alone changes it; everything but `output_tokens` is fixed."""

    id: int
    prompt_tokens: Sequence[int]
    """Never empty, and shorter than the model's context."""
    max_tokens: int
    """The most output tokens, at least 1. Prompt and output together fit the model's context."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the request with STOP: the model's end-of-text ids unless ignored, and the request's own."""
    key_spans: tuple[KeySpan, ...] = ()
    """Prefix keys of the prompt, shortest prefix first, `tokens` non-decreasing."""
    salt: str = ""
    """Requests of different salts share no KV."""
    hashed: CachedSequence | None = None
    """Result of `Scheduler.hash_prompt`, shared by all requests with the same prompt, salt and spans."""
    marks: tuple[CacheMark, ...] = ()
    """What the client asks to keep, shortest first."""
    tools: ToolUse | None = None
    """None: the request names no tools."""
    masks: TokenMasks | None = None
    """What its output follows; None: anything."""
    output_tokens: list[int] = field(default_factory=list)
    """May begin with tokens that another engine has made: they count towards `max_tokens`, and the request goes on
    after them."""
