"""The format of a trace file, and the part of the trace between two times."""

from __future__ import annotations

import gzip
from bisect import bisect_left
from pathlib import Path

import orjson

from loadgen.workloads.base import Workload
from loadgen.workloads.files import BROKEN

FORMATS = ("mooncake", "bailian", "burstgpt", "azure")
_PEEK_BYTES = 2**20


def format_of(path: Path) -> str:
    """Return the format according to the file's first line. Raises ValueError, which says what was found instead."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
        with gzip.open(path) if head == b"\x1f\x8b" else path.open("rb") as file:
            line = file.readline(_PEEK_BYTES).decode("utf-8-sig", errors="replace").strip()
    except BROKEN as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    columns = {name.strip() for name in line.split(",")}
    if {"TIMESTAMP", "ContextTokens"} <= columns:
        return "azure"
    if {"Timestamp", "Request tokens"} <= columns:
        return "burstgpt"
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        fields = None
    if isinstance(fields, dict) and "hash_ids" in fields:
        return "bailian" if "chat_id" in fields else "mooncake"
    raise ValueError(
        f"{path} is not a known trace: its first line is {line[:60]!r}; name its format with --workload, one of"
        f" {', '.join(FORMATS)}"
    )


def window(workload: Workload, start_s: float, end_s: float | None) -> tuple[int, int]:
    """Return the first session at or after `start_s`, and how many from it on begin before `end_s` (None: all)."""
    assert workload.length is not None
    numbers = range(workload.length)

    def starts_s(number: int) -> float:
        return workload.session(number).start_s or 0.0

    first = bisect_left(numbers, start_s, key=starts_s)
    last = len(numbers) if end_s is None else bisect_left(numbers, end_s, key=starts_s)
    return first, max(0, last - first)
