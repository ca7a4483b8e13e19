"""Two prompts side by side: where they differ, and where they agree again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHINGLE_BYTES = 32
"""Two texts that agree in this many consecutive bytes do not agree by chance."""
_WIDTHS = ((256, 1), (2_048, 4), (32_768, 16))
"""Distance and step of each search for the next agreement. Differing values are short, differing documents are long."""
_MAX_DIFFERENCES = 6
_FACTORS = tuple(np.uint64(f) for f in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93))
_MIX = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where a has a[a_start:a_end] and b has b[b_start:b_end]; the texts agree before and after it."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int
    agreeing_bytes: int
    """Length of the agreement after the difference."""


def anchors(text: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return hashes and positions of shingles chosen by their content: text that moves keeps its anchors.

    About one shingle in 16 of a short text is chosen, and one in 256 of a long text. A shingle chosen in a long text is
    also chosen in a short one, so texts of different lengths can be compared.
    """
    count = len(text) - SHINGLE_BYTES + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    words = np.ndarray(shape=(len(text) - 7,), dtype="<u8", buffer=text, strides=(1,))
    mixed = words[:count] * _FACTORS[0]
    for i, factor in enumerate(_FACTORS[1:], 1):
        mixed += words[8 * i : 8 * i + count] * factor
        mixed ^= mixed >> np.uint64(31)
    mixed *= _MIX
    bits = 4 if len(text) <= 2_048 else 6 if len(text) <= 16_384 else 8
    chosen = np.flatnonzero(mixed >> np.uint64(64 - bits) == 0)
    return mixed[chosen], chosen


def common_bytes(a: bytes, i: int, b: bytes, j: int) -> int:
    """Return the length of the common prefix of a[i:] and b[j:]."""
    length, step = 0, 64
    while True:
        left, right = a[i + length : i + length + step], b[j + length : j + length + step]
        if left != right:
            return length + _common_head(left, right)
        length += len(left)
        if len(left) < step:
            return length
        step = min(step * 2, 65_536)


def common_prefix(a: bytes, b: bytes) -> bytes:
    """Return the prefix that both have."""
    return a[: common_bytes(a, 0, b, 0)]


def common_suffix(a: bytes, b: bytes) -> bytes:
    """Return the suffix that both have."""
    return common_prefix(a[::-1], b[::-1])[::-1]


def _common_head(a: bytes, b: bytes) -> int:
    # In big-endian numbers of equal length, the highest differing bit is in the first differing byte.
    length = min(len(a), len(b))
    different = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return length - (different.bit_length() + 7) // 8


def differences(a: bytes, b: bytes) -> Iterator[Difference]:
    """Yield the first differences of two texts, for as long as the texts agree again afterwards."""
    at = common_bytes(a, 0, b, 0)
    i = j = at
    for _ in range(_MAX_DIFFERENCES):
        found = _next_agreement(a, i, b, j)
        if found is None:
            return
        a_end, b_end = found
        agreeing = common_bytes(a, a_end, b, b_end)
        yield Difference(i, a_end, j, b_end, agreeing)
        i, j = a_end + agreeing, b_end + agreeing


def _next_agreement(a: bytes, i: int, b: bytes, j: int) -> tuple[int, int] | None:
    for width, step in _WIDTHS:
        other = b[j : j + width + SHINGLE_BYTES]
        index = {other[t : t + SHINGLE_BYTES]: t for t in range(len(other) - SHINGLE_BYTES, -1, -1)}
        best: tuple[int, int] | None = None
        for s in range(0, min(width, len(a) - i - SHINGLE_BYTES) + 1, step):
            if best and s >= sum(best):
                break
            t = index.get(a[i + s : i + s + SHINGLE_BYTES])
            if t is not None and (best is None or s + t < sum(best)):
                best = (s, t)
        if best:
            s, t = best
            while s and t and a[i + s - 1] == b[j + t - 1]:
                s, t = s - 1, t - 1
            return i + s, j + t
        if len(a) - i <= width and len(b) - j <= width:
            return None
    return None
