"""Which policy helped, by how much, and whether that is more than chance: in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from loadgen.compare import ArmResult, Comparison
from loadgen.metrics import completed, ttft_s
from loadgen.runner import ArmRun

RESAMPLES = 2000
CONFIDENCE = 0.95
SMALL_EFFECT = 1.05
"""Ratios of mean TTFT below this are called equal, however narrow the interval."""
MAX_LAG_SHARE = 0.05
"""A generator that is late by more than this share of the median TTFT has measured itself."""

METHOD = (
    "Speed-ups are ratios of mean TTFT over the requests that both arms completed, paired by session and turn."
    f" The 95 % interval is a bootstrap over whole sessions ({RESAMPLES} resamples). It covers which sessions happened"
    " to be drawn, not what differs between two runs of the same arm; repeat with another --seed for that."
)


class Judgement(StrEnum):
    """An arm against the baseline."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "not distinguishable"


@dataclass(frozen=True, slots=True)
class Contrast:
    """An arm against the baseline: `speedup` = baseline's mean TTFT / the arm's, with the ends of its interval."""

    arm: str
    baseline: str
    pairs: int
    speedup: float
    low: float
    high: float

    @property
    def judgement(self) -> Judgement:
        """Better or worse only where the interval excludes 1 and the effect is not small."""
        if self.low > 1 and self.speedup >= SMALL_EFFECT:
            return Judgement.BETTER
        if self.high < 1 and self.speedup <= 1 / SMALL_EFFECT:
            return Judgement.WORSE
        return Judgement.EQUAL


def contrast(arm: ArmResult, baseline: ArmResult, seed: int) -> Contrast:
    """The paired comparison of two arms. Without common completed requests: 0 pairs, a ratio of 1, no interval."""
    ours, theirs = _ttfts(arm.run), _ttfts(baseline.run)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Contrast(arm.name, baseline.name, 0, 1.0, 0.0, float("inf"))
    numbers = sorted({session for session, _ in common})
    row = {session: i for i, session in enumerate(numbers)}
    sums = np.zeros((2, len(numbers)))
    for key in common:
        sums[:, row[key[0]]] += (theirs[key], ours[key])
    draws = np.random.default_rng(seed).integers(0, len(numbers), (RESAMPLES, len(numbers)))
    ratios = sums[0][draws].sum(axis=1) / sums[1][draws].sum(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Contrast(arm.name, baseline.name, len(common), float(sums[0].sum() / sums[1].sum()), float(low), float(high))


def contrasts(comparison: Comparison) -> list[Contrast]:
    """Every other arm against the baseline, in the order they ran."""
    base = comparison.baseline
    return [contrast(arm, base, comparison.settings.seed) for arm in comparison.arms if arm is not base]


def verdict(comparison: Comparison) -> list[str]:
    """Plain sentences, the most important first; caveats last."""
    found = contrasts(comparison)
    arms = {arm.name: arm for arm in comparison.arms}
    base = comparison.baseline
    if not found:
        return [f"{base.name} ran alone: there is nothing to compare it with.", *_caveats(comparison)]
    best = max(found, key=lambda c: c.speedup)
    if best.judgement is Judgement.BETTER:
        ties = _ties(best, found, arms, comparison.settings.seed)
        lines = [_headline(best, ties, arms, base)]
        found = [c for c in found if c is not best]
    else:
        lines = [f"No policy was distinguishably faster than {base.name} here. {_why_not(arms, base)}"]
    return [*lines, *(_line(c, arms[c.arm]) for c in found), *_caveats(comparison)]


def _ties(best: Contrast, found: Sequence[Contrast], arms: Mapping[str, ArmResult], seed: int) -> list[str]:
    """The arms that are better than the baseline too and cannot be told from the best."""
    others = [c.arm for c in found if c is not best and c.judgement is Judgement.BETTER]
    return [name for name in others if contrast(arms[name], arms[best.arm], seed).judgement is Judgement.EQUAL]


def _headline(best: Contrast, ties: Sequence[str], arms: Mapping[str, ArmResult], base: ArmResult) -> str:
    ours, theirs = arms[best.arm].metrics, base.metrics
    tied = f" {' and '.join(ties)} cannot be told from it." if ties else ""
    return (
        f"{best.arm} {'leads' if ties else 'won'}: mean TTFT {ours.ttft.mean_ms:,.0f} ms against"
        f" {theirs.ttft.mean_ms:,.0f} ms with {base.name}, {best.speedup:.1f} times as fast"
        f" (95 % interval {best.low:.1f} to {best.high:.1f}). Served from cache: {ours.cached_token_rate:.0%} of the"
        f" prompt tokens against {theirs.cached_token_rate:.0%}; p99 TTFT {ours.ttft.p99_ms:,.0f} ms against"
        f" {theirs.ttft.p99_ms:,.0f} ms.{tied}"
    )


def _line(contrast: Contrast, arm: ArmResult) -> str:
    if not contrast.pairs:
        return f"{contrast.arm}: no request completed in both arms, so it cannot be judged."
    return (
        f"{contrast.arm}: {contrast.judgement} than {contrast.baseline} (mean TTFT {arm.metrics.ttft.mean_ms:,.0f} ms,"
        f" {contrast.speedup:.2f} times as fast, interval {contrast.low:.2f} to {contrast.high:.2f})."
    ).replace("not distinguishable than", "not distinguishable from")


def _why_not(arms: Mapping[str, ArmResult], base: ArmResult) -> str:
    base_rate = base.metrics.cached_token_rate
    best_rate = max(arm.metrics.cached_token_rate for arm in arms.values())
    if best_rate < 0.1:
        return f"Hardly anything was reused ({best_rate:.0%} of prompt tokens at best): the prompts share too little."
    if base_rate >= 0.9 * best_rate:
        return (
            f"{base.name} already found {base_rate:.0%} of the prompt tokens cached, the best arm {best_rate:.0%}:"
            " each pod's cache holds nearly all that is shared, so where a request goes hardly matters."
        )
    return (
        f"Reuse rose from {base_rate:.0%} to {best_rate:.0%} of the prompt tokens, but the time saved is small against"
        " the rest of the TTFT: load too low, prompts too short, or decoding dominates."
    )


def _caveats(comparison: Comparison) -> list[str]:
    lines = []
    base = comparison.baseline.metrics
    for arm in comparison.arms:
        m = arm.metrics
        if m.e2e.mean_ms > SMALL_EFFECT * base.e2e.mean_ms and m.ttft.mean_ms < base.ttft.mean_ms:
            lines.append(
                f"Caution: {arm.name} begins its answers sooner but ends them later: mean E2E {m.e2e.mean_ms:,.0f} ms"
                f" against {base.e2e.mean_ms:,.0f} ms with {comparison.baseline.name}."
            )
        if m.failed or m.not_sent:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(m.failures.items()))
            lines.append(
                f"Caution: {arm.name} failed {m.failed} of {m.planned} requests ({reasons or 'none'}) and left"
                f" {m.not_sent} unsent; its latencies are those of the survivors."
            )
        if m.lag.p99_ms > MAX_LAG_SHARE * m.ttft.median_ms and m.completed:
            lines.append(
                f"Caution: in {arm.name} the load generator itself was late by {m.lag.p99_ms:.0f} ms (p99), more than"
                f" {MAX_LAG_SHARE:.0%} of the median TTFT. TTFT includes that lag."
            )
    return lines


def _ttfts(run: ArmRun) -> dict[tuple[int, int], float]:
    return {(record.session, record.turn): ttft_s(record) for record in completed(run.records)}
