"""What a reader must know before relying on a comparison: one sentence per subject, about all arms it concerns."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.experiment.contrasts import DECIDES, Contrasts
from loadgen.experiment.verdict import failed_share
from loadgen.measure.summary import AGREEMENT
from loadgen.measure.validity import MAX_LAG_SHARE
from loadgen.result.model import Arm, Summary

MANY_DUPLICATES = 0.01
"""The report mentions duplicates if more than this share of the requests send a prompt that was sent before."""
_MORE_SESSIONS = "Fewer --sessions make more rounds."


def cautions(arms: Sequence[Arm], contrasts: Contrasts, baseline: str, rounds: int) -> tuple[str, ...]:
    """Return sentences about everything that weakens the verdict or that the verdict does not show."""
    lines = [
        _incomplete(arms),
        _without_usage(arms),
        _disagreements(arms),
        _warm_starts(arms),
        _duplicates(arms),
        _without_pods(arms),
        _late(arms),
        *(_elsewhere(arm.name, contrasts) for arm in arms if arm.name != baseline),
        *contrasts.missing,
        _few_rounds(rounds) if len(arms) > 1 else "",
    ]
    return tuple(line for line in lines if line)


def repeated(distinct: int | None, rounds: int) -> tuple[str, ...]:
    """Warn if `rounds` were played and a data set has sessions for fewer."""
    if distinct is None or rounds <= distinct:
        return ()
    return (
        f"The data set has sessions for {distinct} of {rounds} rounds; the other rounds repeat them. So the intervals"
        f" say little about other sessions. {_MORE_SESSIONS}",
    )


def unplayed(played: int, asked: int) -> tuple[str, ...]:
    """Warn if --rounds asks for more rounds than a data set has sessions for."""
    if played >= asked:
        return ()
    return (
        f"The data set has sessions for {played} of the {asked} rounds that --rounds asks for. The others were not"
        f" played: the same sessions again would narrow the intervals without new information. {_MORE_SESSIONS}",
    )


def _incomplete(arms: Sequence[Arm]) -> str:
    short = [arm for arm in arms if arm.summary.failed or arm.summary.not_sent]
    if not short:
        return ""
    cut = "; ".join(f"{arm.name} {_shortfall(arm.summary)}" for arm in short)
    how = (
        " Means are of requests that both arms completed; in percentiles a failure is infinitely slow."
        if len(arms) > 1
        else " Latencies are those of the other requests."
    )
    return f"Not every request completed: {cut}.{how}"


def _shortfall(summary: Summary) -> str:
    parts = []
    if summary.failed:
        reasons = [f"{n} {why}" if len(summary.failures) > 1 else why for why, n in summary.failures.items()]
        parts.append(f"failed {summary.failed} ({', '.join(reasons)})")
    if summary.not_sent:
        parts.append(f"did not send {summary.not_sent}")
    return f"{' and '.join(parts)} of {summary.planned}, {failed_share(summary):.1%}"


def _without_usage(arms: Sequence[Arm]) -> str:
    silent = [arm for arm in arms if arm.summary.completed and arm.summary.reuse.cached_token_rate is None]
    if not silent:
        return ""
    uncounted = [arm.summary.goodput for arm in silent if not arm.summary.output_tokens]
    wanted = any(goodput and "tpot" in goodput.objectives_ms for goodput in uncounted)
    unmet = " Nor is TPOT: every answer counts as missing its objective." if wanted else ""
    return (
        f"{', '.join(arm.name for arm in silent)}: the answers carry no usage, or none of prompt tokens, so the hit"
        f" rate is not known.{unmet}"
    )


def _disagreements(arms: Sequence[Arm]) -> str:
    apart = [_disagreement(arm.name, arm.summary) for arm in arms if arm.summary.reuse.counters_agree is False]
    return f"Usage and the pods' counters differ: {'; '.join(apart)}. The verdict is based on usage." if apart else ""


def _disagreement(name: str, summary: Summary) -> str:
    usage, counted = summary.reuse.cached_token_rate, summary.reuse.counted_rate
    assert usage is not None
    assert counted is not None
    tokens = sum(pod.counted_prompt_tokens or 0 for pod in summary.pods.values())
    if tokens > (1 + AGREEMENT) * summary.prompt_tokens:
        failed = f" and the {summary.failed} requests that failed" if summary.failed else ""
        why = f"the counters saw {tokens:,} prompt tokens, the answers {summary.prompt_tokens:,}: other traffic{failed}"
    elif tokens < (1 - AGREEMENT) * summary.prompt_tokens:
        why = f"the counters saw {tokens:,} of {summary.prompt_tokens:,} prompt tokens: pods are missing from the list"
    else:
        why = "both saw the same prompt tokens, so the server counts hits differently in the two places"
    return f"{name} {usage:.1%} cached by usage, {counted:.1%} by counters ({why})"


def _warm_starts(arms: Sequence[Arm]) -> str:
    warm = [
        f"{arm.name} found {rate:.0%} of its prompt tokens cached, but its own"
        f" requests could have left about {arm.summary.reuse.attainable_rate or 0:.0%}"
        for arm in arms
        if arm.summary.reuse.exceeds_attainable and (rate := arm.summary.reuse.cached_token_rate) is not None
    ]
    if not warm:
        return ""
    return f"{'; '.join(warm)}: the caches were not empty at the beginning, or other traffic shares these prompts."


def _duplicates(arms: Sequence[Arm]) -> str:
    repeated = [arm for arm in arms if arm.summary.reuse.duplicate_prompts > MANY_DUPLICATES * arm.summary.planned]
    if not repeated:
        return ""
    found: dict[str, list[str]] = {}
    for arm in repeated:
        found.setdefault(f"{arm.summary.reuse.duplicate_prompts} of {arm.summary.planned}", []).append(arm.name)
    counts = "; ".join(f"{times} in {', '.join(names)}" for times, names in found.items())
    return (
        f"Whole prompts were repeated in the same block: {counts}. Regenerated answers do that; users who repeat"
        " each other word for word are rare, and make every cache look better."
    )


def _without_pods(arms: Sequence[Arm]) -> str:
    unknown = [arm.name for arm in arms if arm.summary.completed and arm.summary.request_imbalance is None]
    if not unknown or len(arms) == 1:  # one server, maybe one pod: no load to share
        return ""
    return f"{', '.join(unknown)}: the answers do not name the pod, so how pods shared the load is unknown."


def _late(arms: Sequence[Arm]) -> str:
    """Name the valid arms whose figures include the generator's lag, and say whether all comparisons stand."""
    found = [(arm.name, arm.summary.validity) for arm in arms if arm.summary.validity.valid]
    late = [
        f"{one.lag_share:.1%} of the {one.lag_share_of} TTFT in {name}"
        for name, one in found
        if one.lag_share is not None and one.lag_share > MAX_LAG_SHARE
    ]
    if not late:
        return ""
    stands = "" if any(arm.summary.validity.is_late for arm in arms) else " The comparison stands."
    return f"The load generator's own lag may be {', '.join(late)}.{stands}"


def _elsewhere(name: str, contrasts: Contrasts) -> str:
    """Name metrics that contradict the verdict: an arm may begin answers sooner but end them later, for example."""
    first = contrasts.of(name)
    if first is None or first.judgement != "better":
        return ""
    against = [c for c in contrasts.found if c.arm == name and c.metric != DECIDES and c.judgement == "worse"]
    worse = ", ".join(f"{c.metric} ({c.ratio.value:.2f} times)" for c in against)
    return f"{name} begins its answers sooner than {first.baseline}, but is worse in {worse}." if against else ""


def _few_rounds(rounds: int) -> str:
    if rounds == 1:
        return (
            "There was one round: the intervals cover the choice of sessions, not the difference between two runs of"
            " the same arm, so no arm is judged. Play more rounds for that."
        )
    if rounds < 4:
        return (
            f"There were {rounds} rounds: the intervals cover both sessions and rounds, but so few rounds show only"
            " roughly how much runs differ."
        )
    return ""
