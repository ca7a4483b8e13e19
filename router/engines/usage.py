"""Find an answer's token counts in its headers or the last bytes of its body, without parsing the body."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract import headers

TAIL_BYTES = 4096

# A quote inside generated text is escaped, so `"cached_tokens":` can only be a key of the answer itself.
_NUMBER = {
    name: re.compile(rb'"%b"\s*:\s*(\d{1,12})' % name.encode())
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}
# /v1/messages gives the prompt's tokens in three counts. In its answers, a tool's input is an object that may contain
# such keys, so only the last usage is searched.
_MESSAGE_PROMPT = tuple(
    re.compile(rb'"%b"\s*:\s*(\d{1,12})' % name)
    for name in (b"input_tokens", b"cache_creation_input_tokens", b"cache_read_input_tokens")
)
_MESSAGE_OUTPUT = re.compile(rb'"output_tokens"\s*:\s*(\d{1,12})')
USAGE = re.compile(rb'"usage"\s*:\s*\{')
"""The beginning of an answer's token counts. If it is in the tail, all of them are."""
# The event with the usage of the whole stream. Engines may send usage in every event; earlier ones have less.
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


@dataclass(slots=True)
class Usage:
    """Token counts of one answer; None if the engine did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    is_final: bool = False
    """Whether these are the engine's final counts. If so, a count that the engine gives in other answers is missing
    only if it is 0."""
    is_broken: bool = False
    """Whether the answer broke off, so more would have been generated."""

    def computed_tokens(self, tells_cached_tokens: bool) -> int | None:
        """Return the prompt tokens that were not reused; None if not known. `tells_cached_tokens`: whether the engine
        gives the count of reused tokens unless it is 0."""
        cached = self.cached_tokens
        if cached is None and tells_cached_tokens and self.is_final:
            cached = 0
        return None if cached is None or self.prompt_tokens is None else max(0, self.prompt_tokens - cached)

    def or_else(self, other: Usage) -> Usage:
        """Return these counts, with missing ones taken from `other`."""
        prompt, completion, cached = self.prompt_tokens, self.completion_tokens, self.cached_tokens
        return Usage(
            other.prompt_tokens if prompt is None else prompt,
            other.completion_tokens if completion is None else completion,
            other.cached_tokens if cached is None else cached,
            self.is_final,
            self.is_broken,
        )


class Tail:
    """The last TAIL_BYTES of a body, however small the chunks are in which it comes."""

    __slots__ = ("_chunks", "_size")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        """Add a chunk, and drop what is not needed any more."""
        chunk = chunk[-TAIL_BYTES:]
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > 2 * TAIL_BYTES:
            self._chunks = deque((self.last_bytes(),))
            self._size = TAIL_BYTES

    def last_bytes(self) -> bytes:
        """Return the last bytes of the body, at most TAIL_BYTES."""
        return b"".join(self._chunks)[-TAIL_BYTES:]


def stream_usage(event: bytes, *, is_broken: bool = False) -> Usage:
    """Return the counts in `event`, the data of a stream's last event with a usage. `is_broken`: the stream broke off.

    Engines that give usage in every event do not give cached tokens in the early ones.
    """
    if not event:
        return Usage(is_broken=is_broken)
    usage = usage_in(event[max(0, event.rfind(b'"usage"') - TAIL_BYTES) :])
    ends = _NO_CHOICES.search(event) or b'"message_delta"' in event or b'"input_tokens_details"' in event
    usage.is_final = not is_broken and bool(ends) and not _is_silent_of_cache(usage, event)
    if is_broken:
        usage.is_broken, usage.cached_tokens = True, None
    return usage


def whole_usage(body: bytes) -> Usage:
    """Return the counts in the last TAIL_BYTES of a complete answer that is no stream."""
    tail = body[-TAIL_BYTES:]
    usage = usage_in(tail)
    usage.is_final = (
        tail.find(b'"usage"') >= 0 and USAGE.search(tail) is not None and not _is_silent_of_cache(usage, tail)
    )
    return usage


def usage_in(tail: bytes) -> Usage:
    """Return the last counts in `tail`."""
    if tail.find(b'_tokens"') < 0:  # `in` raises and drops an error, which takes longer than the search
        return Usage()
    if tail.find(b'"output_tokens"') >= 0:
        return _message_usage(tail)
    prompt_tokens, completion_tokens, cached_tokens = (_last(pattern, tail) for pattern in _NUMBER.values())
    return Usage(prompt_tokens, completion_tokens, cached_tokens)


def _message_usage(tail: bytes) -> Usage:
    """Return the counts of `/v1/messages` and `/v1/responses`."""
    event = tail[max(0, tail.rfind(b'"usage"')) :]
    if b'"input_tokens_details"' in event:  # of /v1/responses: all input tokens are in one count
        prompt, cached = _last(_MESSAGE_PROMPT[0], event), _last(_NUMBER["cached_tokens"], event)
        return Usage(prompt, _last(_MESSAGE_OUTPUT, event), cached)
    parts = [_last(pattern, event) for pattern in _MESSAGE_PROMPT]
    prompt_tokens = None if parts[0] is None else sum(part or 0 for part in parts)
    return Usage(prompt_tokens, _last(_MESSAGE_OUTPUT, event), parts[2])


def _is_silent_of_cache(usage: Usage, event: bytes) -> bool:
    """Whether an answer of `/v1/messages` lacks the count of cached tokens: it may be in an earlier event."""
    return usage.cached_tokens is None and b'"output_tokens"' in event


def header_usage(answer: Mapping[str, str]) -> Usage:
    """Return the counts that our own engine sends in headers, with the first token."""
    return Usage(
        prompt_tokens=_count(answer.get(headers.PROMPT_TOKENS)), cached_tokens=_count(answer.get(headers.CACHED))
    )


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    found = pattern.findall(tail)
    return int(found[-1]) if found else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 12 else None
