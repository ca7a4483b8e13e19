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
EARLY_BYTES = 2**20
"""Up to here, a text that comes in pieces is counted only by `loads`, once it is whole."""
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
    """Raise TooManyValues if the JSON text has too many values. What is no JSON may pass: no parser builds it."""
    for _ in ValueCount().look(text):
        pass


class ValueCount:
    """Counts the values of a text that comes in pieces, to refuse it before it is whole.

    The iterators of `add` and `look` count a slice at each step, which takes up to a millisecond.
    """

    def __init__(self) -> None:
        self._nodes = self._values = 0
        self._strings: _Strings | None = None
        """Finds what is inside of strings, to leave it out; None: everything is counted."""
        self._seen: list[bytes | bytearray | memoryview] = []
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._bytes = 0

    def add(self, piece: bytes) -> Iterator[None]:
        """Count a piece, or wait for more. Raises TooManyValues.

        Nothing more is counted once strings had to be left out, which takes ten times as long: `loads` does that once.
        """
        if self._strings is not None:
            return
        self._bytes += len(piece)
        self._waiting_bytes += len(piece)
        self._waiting.append(piece)
        if self._bytes > EARLY_BYTES and self._waiting_bytes >= SLICE_BYTES:
            pieces, self._waiting, self._waiting_bytes = self._waiting, [], 0
            yield from self.look(b"".join(pieces))

    def look(self, piece: bytes | bytearray | memoryview) -> Iterator[None]:
        """Count the next piece. Raises TooManyValues.

        At first, brackets, colons and commas inside of strings are counted too, so the number is too high for some
        prompts. Only then is all counted anew without strings.
        """
        yield from self._count(piece)
        if self._strings is None:
            self._seen.append(piece)
            if self._is_beyond:
                self._strings = _Strings()
                self._nodes = self._values = 0
                seen, self._seen = self._seen, []
                for one in seen:
                    yield from self._count(one)
        if self._is_beyond:
            raise TooManyValues

    @property
    def _is_beyond(self) -> bool:
        return self._nodes > MAX_NODES or self._values >= MAX_VALUES

    def _count(self, whole: bytes | bytearray | memoryview) -> Iterator[None]:
        for _, part in _slices(whole):
            commas, others = part == _COMMA, (part == _COLON) | ((part | _LOWER) == _OPENS)
            if self._strings is not None:
                outside = ~self._strings.inside(part)
                commas, others = commas & outside, others & outside
            self._values += int(np.count_nonzero(commas))
            self._nodes += int(np.count_nonzero(others))
            if self._is_beyond:
                return
            yield


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
