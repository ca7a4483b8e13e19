"""Data set files, plain or gzipped, read record by record; every error names file, place and field."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from engine.common.settings import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_CHARACTERS = 2**20
BROKEN = (OSError, EOFError, UnicodeDecodeError, zlib.error)
"""Errors from reading a file, plain or gzipped."""
_ENCODING = "utf-8-sig"
"""With or without the byte order mark that some programs write."""


class DatasetError(ConfigError):
    """A data set file that cannot be used; the message says which, where and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a file, and its place."""

    where: str
    """The place, as '/data/trace.jsonl:17' or '/data/chats.json, entry 17'."""
    fields: Mapping[str, Any]

    def error(self, field: str, wanted: str) -> DatasetError:
        """Return the error that says what is wrong with a field."""
        given = f"got {shown(self.fields[field])}" if field in self.fields else "it is missing"
        return DatasetError(f"{self.where}: field {field!r} must be {wanted}; {given}")

    def whole(self, field: str, low: int = 0, high: int = 2**63 - 1) -> int:
        """Return a whole number between `low` and `high`, also from text, as in CSV. Raises DatasetError."""
        value = self.fields.get(field)
        wanted = f"a whole number of at least {low}" + (f" and at most {high:,}" if high < 2**63 - 1 else "")
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            raise self.error(field, wanted) from None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise self.error(field, wanted)
        return number

    def number(self, field: str) -> float:
        """Return a finite number, also from text. Raises DatasetError."""
        value = self.fields.get(field)
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not abs(number) < float("inf"):
            raise self.error(field, "a number")
        return number

    def text(self, field: str) -> str:
        """Return non-empty text. Raises DatasetError."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, "text that is not empty")
        return value

    def time_s(self, field: str) -> float:
        """Return seconds since 1970 from an ISO 8601 time; UTC if the time has no zone. Raises DatasetError."""
        try:
            time = datetime.fromisoformat(self.text(field))
        except ValueError:
            raise self.error(field, "a time such as 2023-11-16 18:15:46.68") from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def shown(value: object) -> str:
    """Return the beginning of a value from a file, for an error message."""
    try:
        return repr(str(value)[:80])
    except RecursionError:
        return "a value that is nested too deeply to be shown"


def jsonl_entries(path: Path) -> Iterator[Entry]:
    """Yield the objects of a JSON-lines file; empty lines are skipped. Raises DatasetError."""
    with _opened(path) as file:
        for number, line in enumerate(_lines(path, file), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = orjson.loads(line.strip())
            except orjson.JSONDecodeError as error:
                raise DatasetError(f"{where}: not JSON: {error}") from None
            if not isinstance(fields, dict):
                raise DatasetError(f"{where}: must be a JSON object, got {line.strip()[:80]!r}")
            yield Entry(where, fields)


def csv_entries(path: Path, columns: tuple[str, ...]) -> Iterator[Entry]:
    """Yield the rows of a CSV file that has these columns and maybe others. Raises DatasetError."""
    with _opened(path) as file:
        rows = csv.reader(_lines(path, file))
        try:
            header = [name.strip() for name in next(rows, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise DatasetError(
                    f"{path}:1: column {missing[0]!r} is missing; the first line has {', '.join(header)}"
                )
            for row in rows:
                if row:
                    yield Entry(f"{path}:{rows.line_num}", dict(zip(header, row, strict=False)))
        except csv.Error as error:
            raise DatasetError(f"{path}:{rows.line_num}: not CSV: {error}") from None


def json_entries(path: Path) -> Iterator[Entry]:
    """Yield the objects of one JSON array, or of JSON lines, without holding the file. Raises DatasetError."""
    with _opened(path) as file:
        beginning = next((line.lstrip() for line in _lines(path, file) if line.strip()), "")
    if not beginning.startswith("["):
        yield from jsonl_entries(path)
        return
    with _opened(path) as file:
        for number, fields in enumerate(_array_items(path, file), 1):
            where = f"{path}, entry {number}"
            if not isinstance(fields, dict):
                raise DatasetError(f"{where}: must be a JSON object, got {shown(fields)}")
            yield Entry(where, fields)


def _array_items(path: Path, file: IO[str]) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    buffer, size = _read(path, file, _CHUNK_CHARACTERS).lstrip().removeprefix("["), _CHUNK_CHARACTERS
    number = 0
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            return
        try:
            item, end = decoder.raw_decode(buffer)
        except json.JSONDecodeError as error:
            more = _read(path, file, size)
            if not more:
                raise DatasetError(f"{path}, entry {number + 1}: not JSON: {error.msg}") from None
            buffer += more
            size *= 2  # so a large item is decoded again only when the buffer doubles
            continue
        except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
            raise DatasetError(f"{path}, entry {number + 1}: cannot be read: {error}") from None
        number += 1
        buffer, size = buffer[end:], _CHUNK_CHARACTERS
        yield item


def _opened(path: Path) -> IO[str]:
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == _GZIP_MAGIC
        return (
            gzip.open(path, "rt", encoding=_ENCODING, newline="")
            if gzipped
            else path.open(encoding=_ENCODING, newline="")
        )
    except OSError as error:
        raise _unreadable(path, error) from None


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    try:
        yield from file
    except BROKEN as error:
        raise _unreadable(path, error) from None


def _read(path: Path, file: IO[str], size: int) -> str:
    try:
        return file.read(size)
    except BROKEN as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DatasetError:
    return DatasetError(f"--dataset-path {path} cannot be read: {error}")
