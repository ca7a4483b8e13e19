"""Confidence intervals for an arm compared with the baseline, from rounds and the sessions within them.

Two things differ between repetitions. The first is which sessions were drawn: rounds, and sessions within rounds, are
resampled with replacement, the same ones for both arms. The second is what happened to a whole block (drift of the
machine, a queue that built up). A handful of resampled rounds shows too little of that. So if blocks differ by more
than their sessions explain, each resample is shifted by that excess times a draw from Student's t. The excess is
assumed to be the same for all arms. Then k arms in R rounds give (k - 1)(R - 1) degrees of freedom: the residual of a
two-way layout of arms and rounds. With one round there is no such term, and the interval covers only the sessions.

A bootstrap of few units is too narrow by sqrt((n - 1) / n), and by the difference between Student's t and the normal
law (Hesterberg, What Teachers Should Know About the Bootstrap, 2015). Each resample is stretched to correct both.

Two-stage resampling: Davison and Hinkley, Bootstrap Methods and their Application (1997), 3.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadgen.result.model import Interval

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
WITHIN_RESAMPLES = 400
"""Resamples for the spread of one round's estimate; only the variance of the estimate is used."""
MAX_UNITS = 600
"""More sessions than this are resampled in groups: this many independent units are enough for an interval."""


class Statistic(Protocol):
    """One number per arm, computed from weighted units."""

    def values(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return (baseline, arm) for each row of `weights` (resamples x units). A quantile that falls on a failure is
        infinite."""
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """The weights that all statistics of an experiment share, so that arms are resampled alike."""

    round_of: npt.NDArray[np.int64]
    """The round of each unit, ascending from 0."""
    weights: Floats
    within: tuple[Floats, ...]
    """For each round, weights that resample its sessions; zero for the other rounds."""
    seed: int
    """Seed of later draws."""
    stretch: Floats
    """For each resample, the factor from a normal deviate of n units to Student's t; near 1 with many units."""

    @property
    def rounds(self) -> int:
        """Return the number of rounds."""
        return len(self.within)


def draws(round_of: npt.NDArray[np.int64], seed: int) -> Draws:
    """Return resamples of units; `round_of` has the round of each unit."""
    rng = np.random.default_rng(seed)
    sizes = np.bincount(round_of)
    rounds = len(sizes)
    drawn = rng.multinomial(rounds, np.full(rounds, 1 / rounds), RESAMPLES)
    weights = np.concatenate(
        [rng.multinomial(drawn[:, r] * size, np.full(size, 1 / size)) for r, size in enumerate(sizes)], axis=1
    )
    within = []
    for r, size in enumerate(sizes):
        only = np.zeros((WITHIN_RESAMPLES, len(round_of)))
        only[:, round_of == r] = rng.multinomial(size, np.full(size, 1 / size), WITHIN_RESAMPLES)
        within.append(only)
    units = len(round_of)
    stretch = np.sqrt(units / rng.chisquare(units - 1, RESAMPLES)) if units > rounds else np.ones(RESAMPLES)
    return Draws(round_of, weights.astype(np.float64), tuple(within), seed, stretch)


@dataclass(frozen=True, slots=True)
class Effect:
    """An arm compared with the baseline in one statistic."""

    difference: Interval
    ratio: Interval
    is_above: bool
    """Whether the interval of the ratio lies above 1."""
    is_below: bool


@dataclass(frozen=True, slots=True)
class RoundSpread:
    """How much blocks differ beyond the differences of their sessions."""

    of_mean: float = 0.0
    """Standard deviation due to blocks, in the mean over rounds of log(ratio of two arms)."""
    freedom: int = 1
    """Degrees of freedom of the estimate."""


def round_spread(statistics: Sequence[Statistic], drawn: Draws) -> RoundSpread:
    """Estimate the spread from all arms' statistics against the same baseline; zero with one round."""
    if drawn.rounds < 2:
        return RoundSpread()
    each = np.array([drawn.round_of == r for r in range(drawn.rounds)], np.float64)
    logs = [_log_ratios(statistic, each) for statistic in statistics]
    known = [i for i, row in enumerate(logs) if np.isfinite(row).all()]
    if not known:
        return RoundSpread()
    table = np.array([np.zeros(drawn.rounds), *(logs[i] for i in known)])  # first the baseline against itself
    residual = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    freedom = len(known) * (drawn.rounds - 1)
    between = 2 * float((residual**2).sum()) / freedom
    variances = [_variance(_log_ratios(statistics[i], weights)) for i in known for weights in drawn.within]
    within = [variance for variance in variances if np.isfinite(variance)]
    excess = max(0.0, between - (float(np.mean(within)) if within else 0.0))
    return RoundSpread(float(np.sqrt(excess / drawn.rounds)), freedom)


def effect(statistic: Statistic, drawn: Draws, confidence: float | None, spread: RoundSpread) -> Effect | None:
    """Return estimates, and intervals if `confidence` is given and there is something to resample.

    Return None if a ratio makes no sense, because an arm's value is zero, infinite or missing.
    """
    base, arm = (values[0] for values in statistic.values(np.ones((1, len(drawn.round_of)))))
    if not (np.isfinite(base) and np.isfinite(arm) and base > 0 and arm > 0):
        return None
    if confidence is None or len(drawn.round_of) < 2:
        return Effect(Interval(value=float(arm - base)), Interval(value=float(arm / base)), False, False)
    with np.errstate(all="ignore"):
        bases, arms = statistic.values(drawn.weights)
        # On the logarithmic scale: spread the resamples a little, and shift the arm against the baseline.
        shifts = np.random.default_rng(drawn.seed + 1).standard_t(spread.freedom, RESAMPLES)
        moved = shifts * spread.of_mean / 2
        arms = arm * np.exp(np.log(arms / arm) * drawn.stretch + moved)
        bases = base * np.exp(np.log(bases / base) * drawn.stretch - moved)
        ratios, differences = arms / bases, arms - bases
    low, high = _ends(ratios, confidence)
    return Effect(
        difference=_interval(float(arm - base), *_ends(differences, confidence)),
        ratio=_interval(float(arm / base), low, high),
        is_above=low > 1,
        is_below=high < 1,
    )


def _log_ratios(statistic: Statistic, weights: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        base, arm = statistic.values(weights)
        return np.asarray(np.log(arm / base))


def _variance(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.var()) if len(finite) > 1 else float("nan")


def _ends(values: Floats, confidence: float) -> tuple[float, float]:
    """Return the central interval by nearest rank, so that infinite draws stay infinite."""
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = np.quantile(known, (tail, 1 - tail), method="nearest")
    return float(low), float(high)


def _interval(value: float, low: float, high: float) -> Interval:
    """Return the value with its interval, or without one if an end is infinite or missing."""
    bounded = np.isfinite(low) and np.isfinite(high)
    return Interval(value=value, low=low if bounded else None, high=high if bounded else None)
