"""Sentences that say which arm helped, by how much, whether that may be chance, and why no arm helped if none did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.experiment.contrasts import NOT_JUDGED, Contrasts
from loadgen.measure.validity import in_words
from loadgen.result.model import Arm, Contrast, Summary

FAILED_MORE = 0.01
"""An arm that fails this much more of its requests than the baseline does not win, even if it is fast."""


def verdict(arms: Sequence[Arm], contrasts: Contrasts, baseline: str) -> tuple[str, ...]:
    """Return plain sentences, the most important first."""
    by_name = {arm.name: arm.summary for arm in arms}
    line = in_words({name: summary.validity for name, summary in by_name.items()})
    invalid = (line,) if line else ()
    base = by_name[baseline]
    if len(arms) == 1:
        return (*invalid, f"{baseline} ran alone: there is nothing to compare it with.")
    found = [c for arm in arms if (c := contrasts.of(arm.name)) is not None]
    lines = []
    if found and all(c.judgement == NOT_JUDGED for c in found):
        lines.append("Not judged: one round does not show how much two runs of one arm differ. Play more rounds.")
    elif best := contrasts.of(contrasts.best):
        lines.append(_headline(best, contrasts.ties, by_name, base))
        found = [c for c in found if c is not best]
    else:
        why = "." if invalid else _why_not(found, by_name, base)  # figures of an invalid run explain nothing
        lines.append(f"No arm was distinguishably faster than {baseline}{why}")
    lines += [_line(c, by_name[c.arm], base) for c in found]
    judged = {c.arm for c in contrasts.found if c.metric == "ttft_mean_ms"}
    lines += [
        f"{name}: no request completed in both arms, so this arm cannot be judged."
        for name in by_name
        if name != baseline and name not in judged
    ]
    return (*invalid, *lines)


def able_arms(arms: Sequence[Arm], baseline: str) -> frozenset[str]:
    """Return the arms that may win: those that do not fail notably more of their requests than the baseline."""
    base = next(arm.summary for arm in arms if arm.name == baseline)
    return frozenset(arm.name for arm in arms if not _fails_more(arm.summary, base))


def speedup(contrast: Contrast) -> tuple[float, str]:
    """Return how many times as fast the arm is, and the interval of this factor in words."""
    ratio = contrast.ratio
    if not ratio.low or ratio.high is None:  # from 0 on, the factor has no end
        return 1 / ratio.value, "no interval"
    return 1 / ratio.value, f"interval {1 / ratio.high:.2f} to {1 / ratio.low:.2f}"


def failed_share(summary: Summary) -> float:
    """Return failed and unsent requests / planned requests."""
    return 1 - summary.completed / summary.planned if summary.planned else 0.0


def _fails_more(arm: Summary, base: Summary) -> bool:
    return failed_share(arm) - failed_share(base) > FAILED_MORE


def _headline(best: Contrast, ties: Sequence[str], arms: Mapping[str, Summary], base: Summary) -> str:
    arm = arms[best.arm]
    factor, interval = speedup(best)
    tied = f" {' and '.join(ties)} cannot be distinguished from it." if ties else ""
    return (
        f"{best.arm} {'leads' if ties else 'won'}: mean TTFT {_ms(arm.ttft.mean_ms)} against {_ms(base.ttft.mean_ms)}"
        f" with {best.baseline}, {factor:.2f} times as fast ({interval}). {_cached(arm, base)}"
        f" p99 TTFT {_p99(arm)} against {_p99(base)}.{tied}"
    )


def _line(contrast: Contrast, arm: Summary, base: Summary) -> str:
    factor, interval = speedup(contrast)
    if contrast.judgement == "better" and _fails_more(arm, base):
        judged = (
            f"answers sooner than {contrast.baseline} but fails more"
            f" ({failed_share(arm):.1%} of its requests against {failed_share(base):.1%}), so it does not win"
        )
    elif contrast.judgement == NOT_JUDGED:
        judged = f"not judged against {contrast.baseline}"
    elif contrast.judgement == "not distinguishable":
        judged = f"not distinguishable from {contrast.baseline}"
    else:
        judged = f"{contrast.judgement} than {contrast.baseline}"
    return f"{contrast.arm}: {judged} (mean TTFT {_ms(arm.ttft.mean_ms)}, {factor:.2f} times as fast, {interval})."


def _why_not(found: Sequence[Contrast], arms: Mapping[str, Summary], base: Summary) -> str:
    if any(c.judgement == "better" for c in found):
        return " without failing more of its requests."
    rates = {name: arm.reuse.cached_token_rate for name, arm in arms.items()}
    known = [rate for rate in rates.values() if rate is not None]
    base_rate = base.reuse.cached_token_rate
    if base_rate is None or not known:
        return " here. The server reports no cached tokens, so the reason is not known."
    best_rate, attainable = max(known), base.reuse.attainable_rate
    # Both are lower bounds of what could be found: the attainable share covers only whole strides of bytes.
    if attainable is not None and max(attainable, best_rate) < 0.1:
        return (
            " here. The prompts share too little: even one infinite cache would hold"
            f" {max(attainable, best_rate):.0%} of their tokens."
        )
    if best_rate < 0.1:
        return f" here. Hardly anything was reused: {best_rate:.0%} of prompt tokens at best{_of(attainable)}."
    if base_rate >= 0.9 * best_rate and attainable is not None and base_rate < 0.9 * attainable:
        return (
            f" here. No arm reused more than {best_rate:.0%} of the prompt tokens{_of(attainable)}: the caches are too"
            " small for what is shared, or no arm sends similar prompts to the same pods."
        )
    if base_rate >= 0.9 * best_rate:
        return (
            f" here. The baseline already found {base_rate:.0%} of the prompt tokens cached, the best arm"
            f" {best_rate:.0%}: each pod's cache holds nearly everything that is shared, so routing hardly matters."
        )
    return (
        f" here. Reuse rose from {base_rate:.0%} to {best_rate:.0%} of the prompt tokens, but the time saved is small"
        " compared with the rest of the TTFT: load too low, prompts too short, or decoding dominates."
    )


def _of(attainable: float | None) -> str:
    return "" if attainable is None else f", where one infinite cache would hold {attainable:.0%}"


def _cached(arm: Summary, base: Summary) -> str:
    ours, theirs = arm.reuse.cached_token_rate, base.reuse.cached_token_rate
    if ours is None or theirs is None:
        return "The server reports no cached tokens;"
    attained = arm.reuse.achieved_share
    share = "" if attained is None else f" ({attained:.0%} of what one infinite cache would)"
    return f"Served from cache: {ours:.0%} of the prompt tokens{share} against {theirs:.0%};"


def _p99(summary: Summary) -> str:
    """Return p99 with failures counted as infinite."""
    return (
        _ms(summary.ttft.with_failures_p99_ms)
        if summary.ttft.with_failures_p99_ms is not None
        else "infinite (failures)"
    )


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
