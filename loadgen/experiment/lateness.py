"""Whether the load generator was late enough to cause the difference that a comparison claims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.experiment.contrasts import Contrasts
from loadgen.measure.validity import LATE_TWICE, MAX_LAG_SHARE
from loadgen.result.model import Arm, Contrast, Summary

SHARE_OF_INTERVAL = 0.25
"""Allowed shift, as a share of half the interval's width. At a quarter (0.49 standard errors) a 95 % interval still
covers the true value in 92 % of experiments (normal law)."""
MOST_LAG_SHARE = 2 * MAX_LAG_SHARE
"""Allowed share of the means, even if the interval is wide: with more, the generator is part of the measurement."""


def judged(arms: Sequence[Arm], found: Contrasts, baseline: str) -> tuple[Arm, ...]:
    """Return the arms; an arm is marked if its claim does not stand because the generator was late.

    The claim is the ratio r of an arm's mean TTFT to the baseline's. Lag is a part of both means, so it can change log
    r by up to the larger of the two arms' shares of lag. The allowed change is `MAX_LAG_SHARE` of the effect |log r|,
    or of the factor r if the effect is larger than 1. If no difference is claimed, it is `MAX_LAG_SHARE` of the means,
    because smaller effects are never called a difference. `SHARE_OF_INTERVAL` of half of log r's interval is allowed in
    any case, up to `MOST_LAG_SHARE`.
    """
    by_name = {arm.name: arm.summary for arm in arms}
    return tuple(_judged(arm, found.of(arm.name), by_name[baseline]) for arm in arms)


def possible_shift(arm: Summary, base: Summary) -> float:
    """Return how far lag may have moved the logarithm of the ratio of mean TTFT: at worst it slowed only one arm."""
    return max(_share(arm), _share(base))


def allowed_shift(contrast: Contrast) -> float:
    """Return how far lag may move the logarithm of the ratio before the claim falls."""
    ratio = contrast.ratio
    is_claim = contrast.judgement != "not distinguishable"
    allowed = MAX_LAG_SHARE * (min(1.0, abs(math.log(ratio.value))) if is_claim else 1.0)
    if ratio.low is None or ratio.high is None or ratio.low <= 0:
        return allowed
    return max(allowed, min(SHARE_OF_INTERVAL * math.log(ratio.high / ratio.low) / 2, MOST_LAG_SHARE))


def _judged(arm: Arm, contrast: Contrast | None, base: Summary) -> Arm:
    if contrast is None:
        return arm
    possible, allowed = possible_shift(arm.summary, base), allowed_shift(contrast)
    if possible <= allowed:
        return arm
    late = arm.summary.validity.model_copy(
        update={
            "valid": False,
            "is_late": True,
            "reasons": (*arm.summary.validity.reasons, _reason(contrast, arm.summary, base, possible, allowed)),
        }
    )
    return arm.model_copy(update={"summary": arm.summary.model_copy(update={"validity": late})})


def _reason(contrast: Contrast, arm: Summary, base: Summary, possible: float, allowed: float) -> str:
    return (
        f"the load generator was late by {arm.lag.mean_ms or 0:.1f} ms on average, {base.lag.mean_ms or 0:.1f} ms in"
        f" {contrast.baseline}: that can change the ratio of their mean TTFT by {possible:.1%}, and"
        f" {allowed:.1%} is allowed"
    )


def _share(summary: Summary) -> float:
    mean_ms, lag_ms = summary.ttft.mean_ms, summary.lag.mean_ms
    return LATE_TWICE * lag_ms / mean_ms if mean_ms and lag_ms else 0.0
