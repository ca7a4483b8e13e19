"""Prompts from a file: JSON lines of prompts or request bodies, an access log with bodies, a trace of block ids."""

from __future__ import annotations

import codecs
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat, canonical_tokens
from loadgen.workloads.files import BROKEN

BODY_FIELDS = ("body", "request_body", "request", "requestBody", "payload", "input", "kwargs")
"""Fields in which logs keep the request body, as an object or as JSON in a string."""
TIME_FIELDS = ("timestamp", "time", "ts", "@timestamp", "created", "created_at", "start_time", "arrived_at")
_EPOCH_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
"""An epoch from the first number on counts this many parts of a second: nano-, micro- or milliseconds. In seconds, 1e11
would be the year 5138."""
_TIMES_BELOW = 1e20
"""A larger number is no time: in nanoseconds it would be the year 5138."""
_PEEK_LINES = 200
_MOST_TOKENS = 2**31
"""A line of a trace with a longer prompt is skipped; otherwise sums over all prompts could be infinite."""


class UnusableLog(Exception):
    """The file holds nothing to analyse; the message says what is missing and how to get it."""


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One request, in the order of the file."""

    text: bytes
    """Canonical bytes, from which the gateway computes prefix keys; empty for a trace of block ids."""
    is_chat: bool = False
    tools_bytes: int = 0
    """Length in bytes of the tools' JSON, which comes first."""
    at_s: float | None = None
    block_ids: tuple[int, ...] = ()
    tokens: float | None = None
    """Length given by the file; None: it must be estimated from the bytes."""


@dataclass(slots=True)
class ReadStats:
    """What one reading of the file found."""

    lines: int = 0
    skipped: int = 0
    first_reason: str = ""
    usage_prompt_tokens: int = 0
    usage_cached_tokens: int = 0

    def skip(self, line: int, reason: str) -> None:
        """Count a line without a prompt."""
        self.skipped += 1
        self.first_reason = self.first_reason or f"line {line}: {reason}"


@dataclass(slots=True)
class Source:
    """A file that is read several times, always with the same prompts in the same order."""

    path: Path
    prompt_field: str = ""
    """Dotted path of the field that holds the prompt or the request body; empty: the reader searches for it."""
    stats: ReadStats = field(default_factory=ReadStats)
    limit: int | None = None
    """Number of prompts after which reading stops."""

    def prompts(self) -> Iterator[tuple[LoggedPrompt, float]]:
        """Yield each prompt with the share of the file read so far. Raises UnusableLog."""
        self.stats = stats = ReadStats()
        given = 0
        for line, share in self._lines():
            if self.limit is not None and given >= self.limit:
                return
            prompt = self._prompt(line)
            if prompt is not None:
                given += 1
                yield prompt, share
            elif stats.lines == _PEEK_LINES and not given:
                break
        if not given:
            raise UnusableLog(self._why_nothing())

    def _lines(self) -> Iterator[tuple[Any, float]]:
        """Yield each line, or each value of a JSON array, with the share of the file read so far."""
        if self.path.exists() and not self.path.is_file():
            raise UnusableLog(f"{self.path} must be a regular file: it is read several times")
        try:
            size = max(self.path.stat().st_size, 1)
            with self.path.open("rb") as raw:
                # The position in `raw` tells how much of the file has been read, whether it is compressed or not.
                file = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if self.path.suffix == ".gz" else raw
                if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):  # some Windows programs write one
                    file.read(len(codecs.BOM_UTF8))
                first = file.peek(64).lstrip()[:1]
                if first == b"[":
                    for row in _rows(file.read()):
                        yield row, 1.0
                    return
                for line in file:
                    if line.strip():
                        yield line, raw.tell() / size
        except BROKEN as error:
            raise UnusableLog(f"{self.path} cannot be read: {error}") from None
        except orjson.JSONDecodeError as error:
            raise UnusableLog(f"{self.path} begins with '[' but is not a JSON array: {error}") from None

    def _prompt(self, line: Any) -> LoggedPrompt | None:
        stats = self.stats
        stats.lines += 1
        try:
            row = orjson.loads(line) if isinstance(line, bytes) else line
        except orjson.JSONDecodeError:
            stats.skip(stats.lines, "not JSON")
            return None
        if not isinstance(row, dict):
            row = {"prompt": row}
        stats.usage_prompt_tokens += _count(row, "prompt_tokens") or _count(row, "prompt_tokens_estimated")
        stats.usage_cached_tokens += _count(row, "cached_tokens")
        try:
            return prompt_of(row, self.prompt_field)
        except (BadRequest, ValueError) as error:
            stats.skip(stats.lines, str(error))
            return None

    def _why_nothing(self) -> str:
        stats = self.stats
        if not stats.lines:
            return f"{self.path} is empty"
        text = f"{self.path}: no prompt in {stats.lines:,} lines ({stats.first_reason})."
        if stats.usage_prompt_tokens:
            rate = stats.usage_cached_tokens / stats.usage_prompt_tokens
            text += (
                f" The lines have token counts and no text: {rate:.1%} of {stats.usage_prompt_tokens:,} prompt tokens"
                " were cached, but counts do not tell how many could have been."
            )
        return text + (
            " The file needs one JSON object per line with 'messages', 'prompt' or 'text', a request body in"
            f" {', '.join(repr(name) for name in BODY_FIELDS[:3])}, or block ids in 'hash_ids';"
            " name another field with --field. Access logs leave the body out unless told to log it."
        )


def prompt_of(row: Mapping[str, Any], prompt_field: str = "") -> LoggedPrompt:
    """Return the prompt of one line. Raises ValueError or BadRequest if there is none; the message says why."""
    at_s = _time_s(row)
    if prompt_field:
        return _from_value(_lookup(row, prompt_field), at_s, prompt_field)
    if isinstance(row.get("hash_ids"), list):
        return _from_ids(row, at_s)
    if found := _from_body(row, at_s):
        return found
    for name in BODY_FIELDS:
        if row.get(name):
            return _from_value(row[name], at_s, name)
    raise ValueError(f"it has none of messages, prompt, text, {', '.join(BODY_FIELDS)}, hash_ids")


def _from_value(value: object, at_s: float | None, name: str) -> LoggedPrompt:
    if isinstance(value, str):
        if value.lstrip()[:1] in ("{", "["):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError:
                return LoggedPrompt(str(value).encode(errors="replace"), at_s=at_s)
        else:
            return LoggedPrompt(value.encode(errors="replace"), at_s=at_s)
    if isinstance(value, list):
        value = {"messages": value} if value and isinstance(value[0], dict) else {"prompt": value}
    if isinstance(value, dict) and (found := _from_body(value, at_s)):
        return found
    raise ValueError(f"{name!r} has no prompt: it must be text, messages, or a request body")


def _from_body(body: Mapping[str, Any], at_s: float | None) -> LoggedPrompt | None:
    if isinstance(messages := body.get("messages"), list) and messages:
        tools = body.get("tools")
        tools = tools if isinstance(tools, list) and tools else None
        canonical = canonical_chat(messages, tools)  # raises if the JSON is nested too deeply
        tools_bytes = len(orjson.dumps(tools)) if tools else 0
        return LoggedPrompt(canonical, True, tools_bytes, at_s)
    for name in ("prompt", "text"):
        value = body.get(name)
        if isinstance(value, str) and value:
            return LoggedPrompt(value.encode(errors="replace"), at_s=at_s)
        if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
            return LoggedPrompt(canonical_tokens(value), at_s=at_s)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            return LoggedPrompt(value[0].encode(errors="replace"), at_s=at_s)
    return None


def _from_ids(row: Mapping[str, Any], at_s: float | None) -> LoggedPrompt:
    ids = row["hash_ids"]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError("'hash_ids' must hold integers")
    length = row.get("input_length")
    if not isinstance(length, int | float) or not 0 <= length <= _MOST_TOKENS:
        raise ValueError(f"a line with 'hash_ids' needs 'input_length', a number of tokens from 0 to {_MOST_TOKENS:,}")
    return LoggedPrompt(b"", at_s=at_s, block_ids=tuple(ids), tokens=float(length))


def _lookup(row: Mapping[str, Any], path: str) -> object:
    value: object = row
    for part in path.split("."):
        if isinstance(value, str):
            value = orjson.loads(value)
        if isinstance(value, Sequence) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            raise ValueError(f"there is no field {path!r}")
    return value


def _time_s(row: Mapping[str, Any]) -> float | None:
    for name in TIME_FIELDS:
        value = row.get(name)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            if abs(value) >= _TIMES_BELOW:
                continue
            # Mooncake's traces count milliseconds from their start, Bailian's traces seconds.
            usual = 1e3 if "hash_ids" in row and "chat_id" not in row else 1.0
            return value / next((parts for least, parts in _EPOCH_UNITS if value >= least), usual)
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                continue
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None


def _rows(content: bytes) -> list[Any]:
    """Return the values of a JSON array, or the lines of a file whose first line is one. Raises JSONDecodeError."""
    try:
        rows: list[Any] = orjson.loads(content)
    except orjson.JSONDecodeError:
        lines = [line for line in content.splitlines() if line.strip()]
        orjson.loads(lines[0])
        return lines
    return rows


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) and value > 0 else 0
