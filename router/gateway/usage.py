"""What an answer says of its tokens, from its headers or from the last bytes of its body. It is not parsed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract import headers

TAIL_BYTES = 4096
TAIL_CHUNKS = 8

# A quote inside generated text is escaped, so `"cached_tokens":` can only be a key of the answer itself.
_NUMBER = {
    name: re.compile(rb'"%b"\s*:\s*(\d{1,12})' % name.encode())
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}


@dataclass(slots=True)
class Usage:
    """Token counts of one answer; None where the engine did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def or_else(self, other: Usage) -> Usage:
        """These counts, and those of `other` where they are missing."""
        return Usage(
            _first(self.prompt_tokens, other.prompt_tokens),
            _first(self.completion_tokens, other.completion_tokens),
            _first(self.cached_tokens, other.cached_tokens),
        )


class Tail:
    """The last chunks of a body, kept by reference."""

    __slots__ = ("_chunks", "add")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)
        self.add = self._chunks.append
        """One more chunk; the oldest goes."""

    def usage(self) -> Usage:
        """The counts in the last TAIL_BYTES."""
        return usage_in(self.last_bytes())

    def last_bytes(self) -> bytes:
        """TAIL_BYTES at most."""
        return b"".join(self._chunks)[-TAIL_BYTES:]


def usage_in(tail: bytes) -> Usage:
    """The last counts in `tail`."""
    if b'_tokens"' not in tail:
        return Usage()
    return Usage(*(_last(pattern, tail) for pattern in _NUMBER.values()))


def header_usage(answer: Mapping[str, str]) -> Usage:
    """The counts our own engine sends in headers, with the first token."""
    return Usage(
        prompt_tokens=_count(answer.get(headers.PROMPT_TOKENS)), cached_tokens=_count(answer.get(headers.CACHED))
    )


def _first(count: int | None, other: int | None) -> int | None:
    return other if count is None else count


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    found = pattern.findall(tail)
    return int(found[-1]) if found else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 12 else None
