"""The metrics in which arms are compared; each is a statistic of paired rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from loadgen.experiment.bootstrap import Statistic
from loadgen.experiment.pairs import Pairs, Side
from loadgen.measure.columns import Floats

Better = Literal["lower", "higher"]
GRID = np.concatenate(
    (np.linspace(0, 0.85, 150, endpoint=False), np.linspace(0.85, 0.97, 80, endpoint=False), np.linspace(0.97, 1, 120))
)
"""Ranks at which the values of each arm are cut into bins if there are very many; bins are finer near p99."""
LEAST_BEYOND = 10
"""Requests that must lie beyond a percentile for an interval: a bootstrap of the largest values gives no valid
interval."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metric ready for comparison: its statistic, and the number of pairs of requests behind it."""

    statistic: Statistic
    pairs: int
    unit_is_round: bool = False
    """The metric exists only per block, so only rounds can be resampled."""
    has_interval: bool = True
    """False: there are too few requests for an interval."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`prepare` takes the pairs, the baseline's side and the arm's side; it returns None if nothing can be compared."""

    name: str
    better: Better
    prepare: Callable[[Pairs, Side, Side], Comparison | None]


@dataclass(frozen=True, slots=True)
class RatioOfSums:
    """Sum of one quantity / sum of another, per arm: means and rates. Arrays are 2 x units: baseline, arm."""

    parts: Floats
    wholes: Floats

    def values(self, weights: Floats) -> tuple[Floats, Floats]:
        """See `Statistic`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            base, arm = (
                (weights @ part) / (weights @ whole) for part, whole in zip(self.parts, self.wholes, strict=True)
            )
        return base, arm


class Ranked:
    """Values of both arms, counted in bins by unit; infinity stands for a failure. Shared by all quantiles."""

    def __init__(self, values: tuple[Floats, Floats], unit: npt.NDArray[np.int64], units: int) -> None:
        self.bins = _bins(values)
        self._counts = tuple(_counts(side, self.bins, unit, units) for side in values)

    def cumulated(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return for each arm (resamples x bins) the weight of the values up to the bin."""
        base, arm = (np.cumsum(weights @ counts, axis=1) for counts in self._counts)
        return base, arm


@dataclass(frozen=True, slots=True)
class Quantile:
    """The smallest value that at least a share `q` of requests does not exceed."""

    ranked: Ranked
    q: float

    def values(self, weights: Floats) -> tuple[Floats, Floats]:
        """See `Statistic`."""
        base, arm = (self._of(cumulated) for cumulated in self.ranked.cumulated(weights))
        return base, arm

    def _of(self, cumulated: Floats) -> Floats:
        # Slightly less than the rank: weights are whole numbers, but their product with q is not.
        wanted = cumulated[:, -1:] * self.q - 1e-9
        return np.asarray(self.ranked.bins[np.argmax(cumulated >= wanted, axis=1)])


def compared(objectives: bool) -> tuple[Metric, ...]:
    """Return the metrics of a comparison, the deciding one first; goodput only if there are objectives."""
    metrics = (
        Metric("ttft_mean_ms", "lower", _mean("ttft_s")),
        Metric("ttft_median_ms", "lower", _quantile(0.5)),
        Metric("ttft_p90_ms", "lower", _quantile(0.9)),
        Metric("ttft_p99_ms", "lower", _quantile(0.99)),
        Metric("tpot_mean_ms", "lower", _mean("tpot_s")),
        Metric("e2e_mean_ms", "lower", _mean("e2e_s")),
        Metric("request_throughput", "higher", _throughput),
        Metric("cached_token_rate", "higher", _cached_token_rate),
    )
    return (*metrics, Metric("goodput_share", "higher", _goodput_share)) if objectives else metrics


def _mean(column: str) -> Callable[[Pairs, Side, Side], Comparison | None]:
    """Mean over the requests that both arms completed; otherwise an arm that fails slow requests would look fast."""

    def prepare(pairs: Pairs, base: Side, arm: Side) -> Comparison | None:
        values = [getattr(side, column) * 1000 for side in (base, arm)]
        both = ~np.isnan(values[0]) & ~np.isnan(values[1])
        counts = _by_unit(pairs, both)
        sums = [_by_unit(pairs, np.where(both, side, 0)) for side in values]
        return _rate(sums, [counts, counts], int(both.sum()))

    return prepare


def _quantile(q: float) -> Callable[[Pairs, Side, Side], Comparison | None]:
    """Quantile over the sessions that both arms began; a request that failed or was never sent counts as infinite."""

    def prepare(pairs: Pairs, base: Side, arm: Side) -> Comparison | None:
        both = base.attempted & arm.attempted
        if not both.any():
            return None
        values = [
            np.where(side.completed, np.nan_to_num(side.ttft_s, nan=np.inf), np.inf)[both] for side in (base, arm)
        ]
        ranked = Ranked((values[0] * 1000, values[1] * 1000), pairs.unit[both], len(pairs.round_of))
        requests = int(both.sum())
        return Comparison(Quantile(ranked, q), requests, has_interval=requests * (1 - q) >= LEAST_BEYOND - 1e-9)

    return prepare


def _throughput(pairs: Pairs, base: Side, arm: Side) -> Comparison | None:
    found = _rate([base.block_completed, arm.block_completed], [base.block_duration_s, arm.block_duration_s], 0)
    both = int((base.completed & arm.completed).sum())
    return Comparison(found.statistic, both, unit_is_round=True) if found else None


def _cached_token_rate(pairs: Pairs, base: Side, arm: Side) -> Comparison | None:
    both = base.attempted & arm.attempted
    cached, prompt = (
        [_by_unit(pairs, np.where(both, getattr(side, name), 0)) for side in (base, arm)]
        for name in ("cached_tokens", "prompt_tokens")
    )
    return _rate(cached, prompt, int((both & base.completed & arm.completed).sum()))


def _goodput_share(pairs: Pairs, base: Side, arm: Side) -> Comparison | None:
    both = base.attempted & arm.attempted
    offered = _by_unit(pairs, both)
    return _rate([_by_unit(pairs, both & side.good) for side in (base, arm)], [offered, offered], int(both.sum()))


def _rate(parts: Sequence[Floats], wholes: Sequence[Floats], pairs: int) -> Comparison | None:
    if not all(whole.sum() > 0 for whole in wholes):
        return None
    return Comparison(RatioOfSums(np.array(parts), np.array(wholes)), pairs)


def _by_unit(pairs: Pairs, values: npt.NDArray[np.generic]) -> Floats:
    sums = np.bincount(pairs.unit, weights=values.astype(np.float64), minlength=len(pairs.round_of))
    return sums.astype(np.float64)


def _bins(values: tuple[Floats, Floats]) -> Floats:
    """Return the distinct values if they are few, else quantiles of each arm; infinity is last if it occurs."""
    distinct = np.unique(np.concatenate(values))
    if len(distinct) <= 2 * len(GRID):
        return distinct
    finite = [side[np.isfinite(side)] for side in values]
    cuts = [np.quantile(side, GRID, method="inverted_cdf") for side in finite if len(side)]
    return np.unique(np.concatenate((*cuts, distinct[-1:])))


def _counts(values: Floats, bins: Floats, unit: npt.NDArray[np.int64], units: int) -> Floats:
    """Return units x bins: how many values of the unit are at most the bin's value and above the previous bin's."""
    flat = unit * len(bins) + np.searchsorted(bins, values)
    return np.bincount(flat, minlength=units * len(bins)).reshape(units, len(bins)).astype(np.float64)
