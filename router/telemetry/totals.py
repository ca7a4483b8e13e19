"""Sums over the metrics since the start. A rate or a share of the last seconds is a difference of two of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the gateway started."""

    answers: int = 0
    errors: int = 0
    """Answers with status 500 or above."""
    by_engine: Counter[str] = field(default_factory=Counter)
    """Answers, by pod id."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompts: `prompt`, `cached` and `predicted`."""
    first_byte_bounds_s: Sequence[float] = ()
    first_byte_counts: Sequence[int] = ()
    """Answers in each bucket of the time to their first byte; one more bucket than there are bounds."""
    shadows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By shadow policy: decisions that were the `same`, `other` or `failed`; tokens of prompts (`prompt`), and those of
    them believed cached on the pod that the `acting` policy, or the `shadow`, chose."""

    def first_byte_s(self, since: Totals, quantile: float) -> float | None:
        """Return a quantile of the seconds to the first byte since `since`, linear within its bucket; None: no answers.

        As in Prometheus' `histogram_quantile`, a value beyond the last bound becomes the last bound.
        """
        earlier = since.first_byte_counts or [0] * len(self.first_byte_counts)
        counts = [now - before for now, before in zip(self.first_byte_counts, earlier, strict=True)]
        reached = list(accumulate(counts))
        if not reached or not reached[-1]:
            return None
        rank = quantile * reached[-1]
        bucket = bisect_left(reached, rank)
        if bucket >= len(self.first_byte_bounds_s):
            return self.first_byte_bounds_s[-1]
        low = self.first_byte_bounds_s[bucket - 1] if bucket else 0.0
        high = self.first_byte_bounds_s[bucket]
        return high - (high - low) * (reached[bucket] - rank) / counts[bucket] if counts[bucket] else high
