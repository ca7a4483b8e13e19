"""The kind of a value in which prompts differ. Values that make prompts unique by accident, such as times, have a
pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_MONTHS = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAYS = rb"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK = rb"[0-2]?\d:[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm])?"
_LOOK_AROUND = 48
_LONGEST_SHAPED_BYTES = 128
"""Longer differences are treated as text; the bound also limits the time of pattern searches."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value: `pattern` matches the whole value."""

    name: str
    words: str
    """The name of the kind in a sentence, with its article."""
    pattern: re.Pattern[bytes] | None
    advice: str


_LATER = "move it after everything that requests share, ideally into the last message"

SHAPED = (
    ValueKind(
        "iso_time",
        "a timestamp",
        re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"),
        f"{_LATER}, or give the date alone (one break a day)",
    ),
    ValueKind(
        "uuid",
        "a UUID",
        re.compile(rb"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
        "leave it out of the prompt (send it as a header or in 'metadata'), or " + _LATER,
    ),
    ValueKind(
        "date",
        "a date",
        re.compile(
            rb"\d{4}[-/]\d\d[-/]\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
            rb"|(?:" + _DAYS + rb",? )?(?:" + _MONTHS + rb" \d{1,2}(?:st|nd|rd|th)?|\d{1,2} " + _MONTHS + rb")"
            rb"(?:,? \d{4})?(?:,?(?: at)? " + _CLOCK + rb")?"
        ),
        _LATER,
    ),
    ValueKind("clock", "a time of day", re.compile(_CLOCK), f"{_LATER}, or leave it out"),
    ValueKind("epoch", "an epoch timestamp", re.compile(rb"(?<![\w.])1\d{9}(?:\d{3}|\.\d+)?(?![\w])"), _LATER),
    ValueKind("email", "an e-mail address", re.compile(rb"[\w.+-]+@[\w-]+\.[\w.-]+\w"), _LATER),
    ValueKind(
        "ip", "an IP address", re.compile(rb"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), f"leave it out, or {_LATER}"
    ),
    ValueKind(
        "identifier",
        "an identifier",
        re.compile(
            rb"(?:[A-Za-z]{1,12}[-_#])+(?=[0-9A-Za-z]*\d)[0-9A-Za-z]{2,64}|(?<!\w)(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,64}(?!\w)"
        ),
        "leave it out of the prompt (send it as a header or in 'metadata'), or " + _LATER,
    ),
    ValueKind("number", "a number", re.compile(rb"(?<![\w])\d+(?:[.,]\d+)?(?![\w])"), _LATER),
)
COUNTER = ValueKind("counter", "a counter", SHAPED[-1].pattern, "leave it out, or " + _LATER)
NAME = ValueKind("name", "a name", None, _LATER)
TEXT = ValueKind("text", "a text that differs", None, "put the part that requests share before it")

_VALUE_BYTE = re.compile(rb"[\w.@+\x80-\xff-]")
_NAME = re.compile(rb"[A-Za-z\x80-\xff][\w'.\x80-\xff-]*(?: [A-Za-z\x80-\xff][\w'.\x80-\xff-]*){0,3}")


def value_at(text: bytes, start: int, end: int) -> tuple[ValueKind, int, int]:
    """Return kind and bounds of the value that covers the difference text[start:end]."""
    low, high = max(0, start - _LOOK_AROUND), min(len(text), end + _LOOK_AROUND)
    for kind in SHAPED if end - start <= _LONGEST_SHAPED_BYTES else ():
        assert kind.pattern is not None
        for match in kind.pattern.finditer(text, low, high):
            if match.start() <= start and end <= match.end() and match.start() < match.end():
                return kind, match.start(), match.end()
            if match.start() >= end:
                break
    low, high = _word_start(text, start), max(end, _word_end(text, end))
    words = text[low:high]
    return (NAME if _NAME.fullmatch(words) and len(words) <= 60 else TEXT), low, high


def is_counter(values: list[bytes]) -> bool:
    """Return whether the numbers, in the order of their requests, only grow, and in small steps."""
    try:
        numbers = [float(value.replace(b",", b".")) for value in values]
    except ValueError:
        return False
    steps = [b - a for a, b in pairwise(numbers)]
    return len(numbers) > 3 and all(step >= 0 for step in steps) and sum(steps) <= 1000 * len(steps)


def _word_start(text: bytes, at: int) -> int:
    while at > 0 and _VALUE_BYTE.match(text, at - 1):
        at -= 1
    return at


def _word_end(text: bytes, at: int) -> int:
    while at < len(text) and _VALUE_BYTE.match(text, at):
        at += 1
    while text[at - 1 : at] in (b".", b"-"):
        at -= 1  # the full stop of a sentence is not part of the value
    return at
