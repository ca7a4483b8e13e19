"""Prompts without the text that breaks reuse: a finding's cost is measured with them, on every prompt of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.contract.keys import FIELD_SEPARATOR
from loadgen.analyze.blocks import KeyLog, hit_rate, share
from loadgen.analyze.order import decode_json, sort_units, sorted_json, sorted_tools
from loadgen.analyze.read import LoggedPrompt

_HOLE = b"\x00"


class Repair(Protocol):
    """One change that is applied to prompts."""

    def apply(self, text: bytes, tools_bytes: int) -> tuple[bytes, bytes]:
        """Return the changed text and the value taken out; if nothing changes, the same text and an empty value."""
        ...


@dataclass(frozen=True, slots=True)
class TakeOut:
    """Takes out the value between two contexts, as if it came after everything shared."""

    left: bytes
    """Text before the value; empty: the value is at the very beginning."""
    rights: tuple[bytes, ...]
    """Texts that may follow the value; it ends at the nearest one. Not used if there is a pattern."""
    is_start: bool
    """Whether `left` is the beginning of the prompt."""
    pattern: re.Pattern[bytes] | None = None
    """Shape of the value."""

    def apply(self, text: bytes, tools_bytes: int) -> tuple[bytes, bytes]:
        """See Repair."""
        at = (0 if text.startswith(self.left) else -1) if self.is_start else text.find(self.left)
        if at < 0:
            return text, b""
        start = at + len(self.left)
        if self.pattern:
            match = self.pattern.match(text, start)
            end = match.end() if match else -1
        else:
            end = min((at for right in self.rights if (at := text.find(right, start)) >= 0), default=-1)
        if end < 0:
            return text, b""
        return text[:start] + _HOLE + text[end:], text[start:end]


@dataclass(frozen=True, slots=True)
class SortUnits:
    """Puts paragraphs or lines into one order, the most frequent first."""

    separator: bytes
    rank: Mapping[bytes, int]

    def apply(self, text: bytes, tools_bytes: int) -> tuple[bytes, bytes]:
        """See Repair."""
        return text[:tools_bytes] + sort_units(text[tools_bytes:], self.separator, self.rank), b""


@dataclass(frozen=True, slots=True)
class SortTools:
    """Puts tools and their keys into alphabetical order."""

    def apply(self, text: bytes, tools_bytes: int) -> tuple[bytes, bytes]:
        """See Repair."""
        return (sorted_tools(text[:tools_bytes]) + text[tools_bytes:] if tools_bytes else text), b""


@dataclass(frozen=True, slots=True)
class SortKeys:
    """Sorts the keys of a JSON value, the first JSON after `left`."""

    left: bytes

    def apply(self, text: bytes, tools_bytes: int) -> tuple[bytes, bytes]:
        """See Repair."""
        at = text.find(self.left, tools_bytes)
        if at < 0:
            return text, b""
        found = decode_json(text, at + len(self.left))
        if found is None:
            return text, b""
        end, value = found
        try:
            ordered = sorted_json(value)
        except RecursionError:  # nested just deeply enough to be read and not to be written
            return text, b""
        return text[: at + len(self.left)] + ordered + text[end:], b""


@dataclass(slots=True)
class Variant:
    """The file's prompts with some repairs: collects keys, then returns the hit rate of an infinite cache.

    A value that is taken out counts as a hit if an earlier prompt had the same value there: moved behind shared parts,
    or left between them, such a value would be found in the cache again.
    """

    repairs: Sequence[Repair]
    block_tokens: int
    bytes_per_token: float
    log: KeyLog = field(init=False)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _value_tokens: float = 0.0
    _tokens: float = 0.0

    def __post_init__(self) -> None:
        self.log = KeyLog(self.block_tokens)

    def add(self, prompt: LoggedPrompt) -> None:
        """Add the next prompt of the file."""
        text = prompt.text
        tools_bytes = prompt.tools_bytes
        for number, repair in enumerate(self.repairs):
            before = len(text)
            text, value = repair.apply(text, tools_bytes)
            if isinstance(repair, SortTools) and tools_bytes:
                tools_bytes += len(text) - before
            if value:
                self._count(number, value)
        tokens = len(prompt.text) / self.bytes_per_token
        self._tokens += tokens
        self.log.add_text(text, round(self.block_tokens * self.bytes_per_token), tokens)

    def _count(self, number: int, value: bytes) -> None:
        key = (number, hash(value))
        if key in self._seen:
            self._value_tokens += len(value) / self.bytes_per_token
        self._seen.add(key)

    def hit_rate(self) -> float:
        """Return the share of the original prompts' tokens that an infinite cache would have."""
        return hit_rate(self.log) + share(self._value_tokens, self._tokens)


def json_context(text: bytes, at: int) -> bytes:
    """Return the text before the JSON at `at` in its message: up to 48 bytes."""
    start = max(text.rfind(FIELD_SEPARATOR, 0, at), at - 48, 0)
    return text[start:at]
