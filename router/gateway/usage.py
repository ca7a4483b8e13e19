"""What an answer says of its tokens, from its headers or from the last bytes of its body. It is not parsed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract import headers
from router.gateway.error_events import has_error

TAIL_BYTES = 4096
TAIL_CHUNKS = 8

# A quote inside generated text is escaped, so `"cached_tokens":` can only be a key of the answer itself.
_NUMBER = {
    name: re.compile(rb'"%b"\s*:\s*(\d{1,12})' % name.encode())
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}
# Of /v1/messages: the prompt's tokens are in three counts. Inputs of tools are objects there, so nothing before the
# last usage is looked at.
_MESSAGE_PROMPT = tuple(
    re.compile(rb'"%b"\s*:\s*(\d{1,12})' % name)
    for name in (b"input_tokens", b"cache_creation_input_tokens", b"cache_read_input_tokens")
)
_MESSAGE_OUTPUT = re.compile(rb'"output_tokens"\s*:\s*(\d{1,12})')
# Where its beginning is there, nothing of it lies before the tail.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
# The event with the usage of the whole stream. Engines can be asked for usage in every event; the others say less.
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


@dataclass(slots=True)
class Usage:
    """Token counts of one answer; None where the engine did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    is_final: bool = False
    """They are the engine's account of all of it: of what an engine tells at all, it leaves out only what is 0."""
    is_broken: bool = False
    """The answer broke off: more would have been generated."""

    def computed_tokens(self, tells_cached_tokens: bool) -> int | None:
        """Prompt tokens that were not reused; None where it is not known. `tells_cached_tokens`: the engine says what
        it reused, but for 0."""
        cached = self.cached_tokens
        if cached is None and tells_cached_tokens and self.is_final:
            cached = 0
        return None if cached is None or self.prompt_tokens is None else max(0, self.prompt_tokens - cached)

    def or_else(self, other: Usage) -> Usage:
        """These counts, and those of `other` where they are missing."""
        return Usage(
            _first(self.prompt_tokens, other.prompt_tokens),
            _first(self.completion_tokens, other.completion_tokens),
            _first(self.cached_tokens, other.cached_tokens),
            self.is_final,
            self.is_broken,
        )


class Tail:
    """The last chunks of a body, kept by reference."""

    __slots__ = ("_chunks", "add")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)
        self.add = self._chunks.append
        """One more chunk; the oldest goes."""

    def usage(self, *, is_broken: bool = False) -> Usage:
        """The counts in the last TAIL_BYTES of a stream. `is_broken`: it ended before its end.

        Engines that tell usage in every event know nothing of the cache in the early ones.
        """
        tail = self.last_bytes()
        usage = usage_in(tail)
        event = _last_usage_event(tail)
        ends = _NO_CHOICES.search(event) or b'"message_delta"' in event or b'"input_tokens_details"' in event
        usage.is_final = not is_broken and bool(_USAGE.search(event) and ends) and not has_error(tail)
        usage.is_final &= not _is_silent_of_cache(usage, event)
        if is_broken:
            usage.is_broken, usage.cached_tokens = True, None
        return usage

    def last_bytes(self) -> bytes:
        """TAIL_BYTES at most."""
        return b"".join(self._chunks)[-TAIL_BYTES:]


def whole_usage(body: bytes) -> Usage:
    """The counts in the last TAIL_BYTES of an answer that is no stream, and here to its end."""
    tail = body[-TAIL_BYTES:]
    usage = usage_in(tail)
    usage.is_final = b'"usage"' in tail and _USAGE.search(tail) is not None and not _is_silent_of_cache(usage, tail)
    return usage


def usage_in(tail: bytes) -> Usage:
    """The last counts in `tail`."""
    if b'_tokens"' not in tail:
        return Usage()
    if b'"output_tokens"' in tail:
        return _message_usage(tail)
    prompt_tokens, completion_tokens, cached_tokens = (_last(pattern, tail) for pattern in _NUMBER.values())
    return Usage(prompt_tokens, completion_tokens, cached_tokens)


def _message_usage(tail: bytes) -> Usage:
    """Those of `/v1/messages` and `/v1/responses`."""
    said = tail[max(0, tail.rfind(b'"usage"')) :]
    if b'"input_tokens_details"' in said:  # of /v1/responses: all input tokens are in one count
        prompt, cached = _last(_MESSAGE_PROMPT[0], said), _last(_NUMBER["cached_tokens"], said)
        return Usage(prompt, _last(_MESSAGE_OUTPUT, said), cached)
    parts = [_last(pattern, said) for pattern in _MESSAGE_PROMPT]
    prompt_tokens = None if parts[0] is None else sum(part or 0 for part in parts)
    return Usage(prompt_tokens, _last(_MESSAGE_OUTPUT, said), parts[2])


def _is_silent_of_cache(usage: Usage, said: bytes) -> bool:
    """Whether an answer of `/v1/messages` has no count of cached tokens: an engine may tell of them elsewhere only."""
    return usage.cached_tokens is None and b'"output_tokens"' in said


def header_usage(answer: Mapping[str, str]) -> Usage:
    """The counts our own engine sends in headers, with the first token."""
    return Usage(
        prompt_tokens=_count(answer.get(headers.PROMPT_TOKENS)), cached_tokens=_count(answer.get(headers.CACHED))
    )


def _first(count: int | None, other: int | None) -> int | None:
    return other if count is None else count


def _last_usage_event(tail: bytes) -> bytes:
    """The line of `tail` that tells the last usage; empty without one, or where its end is missing."""
    at = tail.rfind(b'"usage"')
    end = tail.find(b"\n", at)
    return tail[tail.rfind(b"\n", 0, at) + 1 : end] if 0 <= at < end else b""


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    found = pattern.findall(tail)
    return int(found[-1]) if found else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 12 else None
