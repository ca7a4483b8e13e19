"""The result as CSV: a row for each arm, block and step of a sweep; all files have the same columns, with units."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from loadgen.output.columns import Value, measures
from loadgen.result.model import Result, Summary

Cells = dict[str, Value | str]
LEADING = (
    "kind",
    "arm",
    "block",
    "rate_per_s",
    "concurrency",
    "saturated",
    "url",
    "policy",
    "model",
    "seed",
    "created",
)
"""`kind` is arm, block or step; cells that do not apply are empty."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Spreadsheets compute a text that begins like this. A server may call its model anything, so an apostrophe makes such
a text plain."""


def render_csv(result: Result) -> str:
    """Return RFC 4180 text with a header row. Numbers have full precision; not measured: empty; booleans: true and
    false.

    A Result without arms gives an empty text.
    """
    buffer = io.StringIO(newline="")
    writer: csv.DictWriter[str] | None = None
    for row in _rows(result):
        if writer is None:
            writer = csv.DictWriter(buffer, list(row), lineterminator="\r\n")
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return buffer.getvalue()


def _rows(result: Result) -> Iterator[Cells]:
    common: Cells = {"model": result.model, "seed": result.seed, "created": result.created}
    for arm in result.arms:
        place: Cells = {"arm": arm.name, "url": arm.url, "policy": arm.policy, **common}
        yield _row(arm.summary, kind="arm", **place)
        for i, block in enumerate(arm.blocks, 1):
            yield _row(block, kind="block", block=i, **place)
    for point in result.sweep:
        step: Cells = {
            "arm": point.arm,
            "rate_per_s": point.rate,
            "concurrency": point.concurrency,
            "saturated": point.saturated,
        }
        yield _row(point.summary, kind="step", **step, **common)


def _row(summary: Summary, **place: Value | str) -> Cells:
    return {**{name: place.get(name) for name in LEADING}, **measures(summary)}


def _cell(value: Value | str) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
