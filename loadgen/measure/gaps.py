"""Gaps between chunks of completed requests, pooled in a histogram: a million requests have too many to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

SMALLEST_S = 1e-6
GROWTH = 1.01
BUCKETS = 2 + math.ceil(math.log(1e4 / SMALLEST_S) / math.log(GROWTH))
"""Bucket 0 holds gaps below a microsecond (chunks that came in one read), the last one holds gaps over 10,000 s."""


class GapHistogram:
    """Counts of gaps in buckets 1 % wide; mean, std and extremes are exact, quantiles within half a bucket."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(BUCKETS, np.int64)
        self.count = 0
        self.mean = math.nan
        """In seconds; nan if there is no gap."""
        self._squares = 0.0
        self._low, self._high = math.inf, -math.inf

    @property
    def std(self) -> float:
        """Return the population standard deviation in seconds; nan if there is no gap."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def add(self, gaps_s: Sequence[float] | npt.NDArray[np.float64]) -> None:
        """Count `gaps_s`, each at least 0."""
        values = np.asarray(gaps_s, np.float64)
        if not values.size:
            return
        logs = np.log(np.maximum(values, SMALLEST_S / 2) / SMALLEST_S) / math.log(GROWTH)
        buckets = np.clip(np.floor(logs).astype(np.int64) + 1, 0, BUCKETS - 1)
        self.counts += np.bincount(buckets, minlength=BUCKETS)
        mean = float(values.mean())
        self._pool(values.size, mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))

    def merge(self, other: Self) -> None:
        """Add everything that `other` counted."""
        if other.count:
            self.counts += other.counts
            self._pool(other.count, other.mean, other._squares, other._low, other._high)

    def quantile(self, q: float) -> float:
        """Return the gap in seconds that a share `q` (0 to 1) of gaps does not exceed; nan if there is no gap."""
        if not self.count:
            return math.nan
        rank = min(max(math.ceil(q * self.count), 1), self.count)
        if rank == 1 or rank == self.count:
            return self._low if rank == 1 else self._high
        bucket = int(np.searchsorted(np.cumsum(self.counts), rank))
        middle = SMALLEST_S * GROWTH ** (bucket - 0.5) if bucket else 0.0
        return min(max(middle, self._low), self._high)

    def _pool(self, count: int, mean: float, squares: float, low: float, high: float) -> None:
        # Chan, Golub, LeVeque (1979), updating formulae for sample variances: no cancellation of large sums.
        if self.count:
            total, delta = self.count + count, mean - self.mean
            squares += self._squares + delta * delta * self.count * count / total
            mean = self.mean + delta * count / total
        self.count += count
        self.mean, self._squares = mean, squares
        self._low, self._high = min(self._low, low), max(self._high, high)
