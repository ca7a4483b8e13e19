"""Random draws that depend only on names: the same in every process, whatever was drawn before."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from xxhash import xxh3_64_intdigest

_ROUNDS = 4
"""Rounds of the Feistel network: enough for an order that mixes prompts of different groups."""


def rng_of(seed: int, *names: str | int) -> random.Random:
    """Return a generator determined by the names, the same in every process."""
    return random.Random(_hashed(seed, names))


def whole_between(low: int, high: int, seed: int, *names: str | int) -> int:
    """Return a whole number in low .. high determined by the names: one draw, ten times cheaper than a generator."""
    return low + _hashed(seed, names) % (high - low + 1)


def _hashed(seed: int, names: tuple[str | int, ...]) -> int:
    return xxh3_64_intdigest("/".join(map(str, (seed, *names))).encode())


@dataclass(frozen=True, slots=True)
class Zipf:
    """Popularity of `count` items: item i (from 0) has probability proportional to (i + 1) ** -exponent."""

    count: int
    exponent: float
    _cumulative: array[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = ((i + 1) ** -self.exponent for i in range(self.count))
        object.__setattr__(self, "_cumulative", array("d", accumulate(weights)))

    def draw(self, rng: random.Random) -> int:
        """Return one item."""
        return min(self.count - 1, bisect_right(self._cumulative, rng.random() * self._cumulative[-1]))

    def draw_distinct(self, rng: random.Random, count: int) -> list[int]:
        """Return `count` different items in the order drawn; all items if there are no more."""
        if count >= self.count:
            return rng.sample(range(self.count), self.count)
        found: dict[int, None] = {}
        # Popular items are drawn again and again. So the number of draws is limited, and then the most popular items
        # that are left fill the rest.
        for _ in range(20 * count):
            found[self.draw(rng)] = None
            if len(found) == count:
                return list(found)
        missing = (i for i in range(self.count) if i not in found)
        return [*found, *(next(missing) for _ in range(count - len(found)))]


def permuted(index: int, size: int, seed: int) -> int:
    """Return the place of `index` of range(size) in a permutation determined by the seed.

    It is a Feistel network, walked until the value is in range: Black and Rogaway, "Ciphers with arbitrary finite
    domains" (2002). It needs no table of `size` entries.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (xxh3_64_intdigest(b"%d/%d" % (number, right), seed & (2**64 - 1)) & mask)
        index = left << half | right
        if index < size:
            return index


def facts(workload: Any, *left_out: str) -> Mapping[str, str]:
    """Return a dataclass's fields in words: `x_min` and `x_max` as one range."""
    out: dict[str, str] = {}
    for item in fields(workload):
        if not item.init or item.name in ("name", *left_out) or item.name.endswith("_max"):
            continue
        value = getattr(workload, item.name)
        if item.name.endswith("_min"):
            high = getattr(workload, f"{item.name[:-4]}_max")
            out[item.name[:-4].replace("_", " ")] = f"{value}" if value == high else f"{value} to {high}"
        else:
            out[item.name.replace("_", " ")] = f"{value:g}" if isinstance(value, float) else str(value)
    return out


def checked(number: int, length: int | None) -> int:
    """Return the number of a session. Raises IndexError if there is no such session."""
    if number < 0 or (length is not None and number >= length):
        raise IndexError(f"session {number} of {'any number' if length is None else length}")
    return number
