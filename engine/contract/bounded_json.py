"""Read JSON that another process sent, within bounds on what it becomes in memory, and find its parts without building
anything.

A list without entries takes 2 bytes of JSON, and 64 as an object: 16 MiB of `[[],[],...]` became 360 MB, and kept the
event loop for seconds. So values are counted before anything is built. Nesting is bounded too: orjson refuses more than
1024 levels before it builds an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

MAX_NODES = 2**17
"""The most lists, objects and fields of objects together. A chat with 10,000 messages that have parts has 90,000. Each
takes up to 230 bytes, and half a microsecond to build."""
MAX_VALUES = 2**20
"""The most entries of lists and objects. A prompt of a million token ids has as many. A number or a string takes up to
100 bytes besides its characters."""
FREE_BYTES = 2 * MAX_NODES
"""A shorter text is within the bounds: a list takes 2 bytes, a field 4, an entry of a list 2."""
SLICE_BYTES = 2**17
"""Numpy's temporary arrays of a slice fit into a core's cache."""
_QUOTE, _COMMA, _COLON, _BACKSLASH = b'",:\\'
_OPENS, _CLOSES = b"{}"
_LOWER = 0x20
"""Bit that makes a square bracket a brace. Outside of strings, no other character of JSON becomes one."""

_Bytes = NDArray[np.uint8]
_Flags = NDArray[np.bool_]


class TooManyValues(orjson.JSONDecodeError):
    """The text has more values than MAX_NODES and MAX_VALUES allow."""

    def __init__(self) -> None:
        super().__init__(
            f"it has more than {MAX_NODES} lists, objects and fields, or more than {MAX_VALUES} values", "", 0
        )

    def __str__(self) -> str:
        return self.msg


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON text. Raises orjson.JSONDecodeError, a ValueError; TooManyValues is one of them."""
    if len(text) > FREE_BYTES:
        check(text)
    return orjson.loads(text)  # noqa: TID251


def check(text: bytes | bytearray | memoryview) -> None:
    """Raise TooManyValues if the JSON text has too many values. What is no JSON may pass: no parser builds it.

    At first, brackets, colons and commas inside of strings are counted too, so the number is too high for some prompts.
    Only then is all counted anew without strings, which takes ten times as long.
    """
    if _is_beyond(text, None) and _is_beyond(text, _Strings()):
        raise TooManyValues


def _is_beyond(text: bytes | bytearray | memoryview, strings: _Strings | None) -> bool:
    """Whether the text has too many values. `strings`: finds what to leave out; None: everything is counted."""
    nodes = values = 0
    for _, part in _slices(text):
        commas, others = part == _COMMA, (part == _COLON) | ((part | _LOWER) == _OPENS)
        if strings is not None:
            outside = ~strings.inside(part)
            commas, others = commas & outside, others & outside
        values += int(np.count_nonzero(commas))
        nodes += int(np.count_nonzero(others))
        if nodes > MAX_NODES or values >= MAX_VALUES:
            return True
    return False


def commas_between_fields(text: bytes) -> NDArray[np.intp]:
    """Return where the commas between the fields of a JSON object are, without those inside of its values."""
    strings, depth, found = _Strings(), 0, []
    for start, part in _slices(text):
        outside = ~strings.inside(part)
        lower = part | _LOWER
        brackets = np.flatnonzero(((lower == _OPENS) | (lower == _CLOSES)) & outside)
        depths = np.cumsum(np.where(lower[brackets] == _OPENS, 1, -1), dtype=np.intp) + depth
        depths = np.concatenate((np.array([depth]), depths))
        commas = np.flatnonzero((part == _COMMA) & outside)
        found.append(commas[depths[np.searchsorted(brackets, commas)] == 1] + start)
        depth = int(depths[-1])
    return np.concatenate(found)


def _slices(text: bytes | bytearray | memoryview) -> Iterator[tuple[int, _Bytes]]:
    """Yield each slice with the place where it begins."""
    whole = np.frombuffer(text, np.uint8)
    return ((at, whole[at : at + SLICE_BYTES]) for at in range(0, len(whole), SLICE_BYTES))


class _Strings:
    """Finds the bytes inside of JSON strings, slice by slice.

    A byte is inside if an odd number of quotes is before it, without escaped quotes. The parities of 64 bytes at a time
    are one number, as in simdjson: https://arxiv.org/abs/1902.08318, section 3.1.1.
    """

    def __init__(self) -> None:
        self._is_inside = np.uint64(0)
        self._is_escaped = False
        """Whether the last slice ends with a backslash that escapes the first byte of the next one."""

    def inside(self, part: _Bytes) -> _Flags:
        """Return which bytes of the next slice are inside of a string. A quote that begins a string is, one that ends
        it is not."""
        packed = np.packbits(self._quotes(part), bitorder="little")
        bits = np.zeros(-(-len(part) // 64) * 8, np.uint8)
        bits[: len(packed)] = packed
        words = bits.view("<u8").astype(np.uint64)
        for shift in (1, 2, 4, 8, 16, 32):
            words ^= words << np.uint64(shift)
        ends = np.bitwise_xor.accumulate(words >> np.uint64(63)) ^ self._is_inside
        before = np.concatenate((np.array([self._is_inside]), ends[:-1]))
        words ^= np.uint64(0) - before
        self._is_inside = ends[-1]
        flags = np.unpackbits(words.astype("<u8").view(np.uint8), count=len(part), bitorder="little")
        inside: _Flags = flags.view(np.bool_)
        return inside

    def _quotes(self, part: _Bytes) -> _Flags:
        """Return which bytes of the next slice are quotes that no backslash escapes."""
        quotes: _Flags = part == _QUOTE
        if self._is_escaped:
            quotes[0] = False
        backslashes = np.flatnonzero(part == _BACKSLASH)
        if not len(backslashes):
            self._is_escaped = False
            return quotes
        begins_run = np.concatenate(([True], np.diff(backslashes) != 1))
        run = np.maximum.accumulate(np.where(begins_run, backslashes, 0))
        if self._is_escaped:
            run[run == 0] = 1  # an escaped backslash at 0 escapes nothing
        escaped = backslashes[(backslashes - run) & 1 == 0] + 1  # every other backslash of a run escapes what follows
        self._is_escaped = bool(len(escaped)) and escaped[-1] == len(part)
        quotes[escaped[:-1] if self._is_escaped else escaped] = False
        return quotes
