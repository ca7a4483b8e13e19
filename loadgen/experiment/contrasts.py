"""Every arm compared with the baseline in every metric, with a judgement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from loadgen.experiment.bootstrap import Effect, draws, effect, round_spread
from loadgen.experiment.compared import Metric, compared
from loadgen.experiment.pairs import Pairs
from loadgen.result.model import Contrast

CONFIDENCE = 0.95
SMALL_EFFECT = 1.05
"""Ratios nearer to 1 than this are called not distinguishable, even if the interval is narrow."""
Judgement = Literal["better", "worse", "not distinguishable"]
NOT_JUDGED: Final = "not judged"
"""Of comparisons over one round: no figure says how much two runs of the same arm differ."""
DECIDES = "ttft_mean_ms"
"""The metric that decides the verdict and the number of rounds."""


@dataclass(frozen=True, slots=True)
class Contrasts:
    """The comparisons, and which comparisons make no sense."""

    found: tuple[Contrast, ...]
    missing: tuple[str, ...] = ()
    """A sentence for each set of metrics that cannot be compared, with the arms it concerns."""
    best: str = ""
    """The fastest eligible arm among those better than the baseline; empty: none is better."""
    ties: tuple[str, ...] = ()
    """Other eligible arms that are better than the baseline and cannot be distinguished from the best."""

    def of(self, arm: str, metric: str = DECIDES) -> Contrast | None:
        """Return the contrast of one arm in one metric."""
        return next((c for c in self.found if c.arm == arm and c.metric == metric), None)


class Contraster:
    """Compares the arms of one set of pairs. All comparisons use the same resamples of sessions."""

    def __init__(self, pairs: Pairs, arms: int, seed: int) -> None:
        self._pairs = pairs
        # Bonferroni: the intervals of one metric hold for all arms together.
        self.confidence = joint_confidence(arms)
        self._drawn = draws(pairs.round_of, seed)
        self._drawn_rounds = draws(np.arange(self._drawn.rounds), seed)

    def contrasts(self, metric: Metric, baseline: str, arms: Sequence[str]) -> dict[str, Contrast]:
        """Compare `arms` with the baseline in one metric; arms for which a ratio makes no sense are left out."""
        sides = self._pairs.sides
        prepared = {arm: metric.prepare(self._pairs, sides[baseline], sides[arm]) for arm in arms}
        ready = {arm: comparison for arm, comparison in prepared.items() if comparison is not None}
        if not ready:
            return {}
        is_by_round = next(iter(ready.values())).unit_is_round
        drawn = self._drawn_rounds if is_by_round else self._drawn
        spread = round_spread([comparison.statistic for comparison in ready.values()], drawn)
        found = {}
        for arm, comparison in ready.items():
            confidence = self.confidence if comparison.has_interval else None
            if (measured := effect(comparison.statistic, drawn, confidence, spread)) is not None:
                found[arm] = _contrast(metric, baseline, arm, comparison.pairs, measured)
        return found


def _contrast(metric: Metric, baseline: str, arm: str, pairs: int, found: Effect) -> Contrast:
    return Contrast(
        metric=metric.name,
        better=metric.better,
        baseline=baseline,
        arm=arm,
        pairs=pairs,
        difference=found.difference,
        ratio=found.ratio,
        judgement=_judgement(found, metric),
    )


def joint_confidence(arms: int) -> float:
    """Return the confidence that each interval needs, so that all of them hold in 95 % of experiments (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(arms - 1, 1)


def contrasts(
    pairs: Pairs, arms: Sequence[str], baseline: str, seed: int, *, able: Collection[str], has_objectives: bool = False
) -> Contrasts:
    """Compare every other arm with the baseline. Only an arm in `able` can be the best, or a tie with the best."""
    contraster = Contraster(pairs, len(arms), seed)
    others = [arm for arm in arms if arm != baseline]
    metrics = compared(has_objectives)
    by_metric = {metric.name: contraster.contrasts(metric, baseline, others) for metric in metrics}
    found = [c for arm in others for metric in metrics if (c := by_metric[metric.name].get(arm))]
    absent = {arm: [metric for metric in metrics if arm not in by_metric[metric.name]] for arm in others}
    best, ties = _leaders(contraster, [c for c in found if c.arm in able])
    return Contrasts(tuple(found), _missing(absent, baseline), best, ties)


def over_rounds(found: Contrasts, rounds: int) -> Contrasts:
    """Return the comparisons of this many rounds: over one round, they are only figures, and no arm is the best."""
    if rounds > 1:
        return found
    return Contrasts(tuple(c.model_copy(update={"judgement": NOT_JUDGED}) for c in found.found), found.missing)


def _missing(absent: Mapping[str, Sequence[Metric]], baseline: str) -> tuple[str, ...]:
    concerned: dict[tuple[str, str], list[str]] = {}
    for arm, metrics in absent.items():
        reasons = dict.fromkeys(_why_missing(metric) for metric in metrics)
        for reason in reasons:
            names = ", ".join(metric.name for metric in metrics if _why_missing(metric) == reason)
            concerned.setdefault((names, reason), []).append(arm)
    return tuple(
        f"{', '.join(arms)}: no comparison with {baseline} in {names}: {reason}."
        for (names, reason), arms in concerned.items()
    )


def _leaders(contraster: Contraster, found: Sequence[Contrast]) -> tuple[str, tuple[str, ...]]:
    """Return the best arm and its ties."""
    better = [c for c in found if c.metric == DECIDES and c.judgement == "better"]
    if not better:
        return "", ()
    best = min(better, key=lambda c: c.ratio.value)
    against = contraster.contrasts(compared(False)[0], best.arm, [c.arm for c in better if c is not best])
    return best.arm, tuple(arm for arm, c in against.items() if c.judgement == "not distinguishable")


def relative_half_width(contrast: Contrast | None) -> float:
    """Return half the width of the ratio's interval, relative to the ratio; infinite without an interval."""
    if contrast is None or contrast.ratio.low is None or contrast.ratio.high is None:
        return float("inf")
    return (contrast.ratio.high - contrast.ratio.low) / 2 / contrast.ratio.value


def _judgement(found: Effect, metric: Metric) -> Judgement:
    ratio = found.ratio.value
    is_above = found.is_above and ratio >= SMALL_EFFECT
    is_below = found.is_below and ratio <= 1 / SMALL_EFFECT
    if not (is_above or is_below):
        return "not distinguishable"
    return "better" if is_above == (metric.better == "higher") else "worse"


def _why_missing(metric: Metric) -> str:
    if metric.name.startswith("ttft_") and metric.name != DECIDES:
        return "so many requests failed, or never came, that the percentile is infinite in one of them"
    return "in one of them it is zero or was not measured"
