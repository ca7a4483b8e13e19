"""What a reader must know before relying on a comparison: each a sentence of its own."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.experiment.contrasts import DECIDES, Contrasts
from loadgen.experiment.verdict import failed_share
from loadgen.measure.summary import AGREEMENT
from loadgen.result.model import Arm, Summary

WARM_START = 0.02
"""A hit rate this much above what the block itself could have put into the caches means that they were not empty."""
MANY_DUPLICATES = 0.01


def cautions(arms: Sequence[Arm], contrasts: Contrasts, baseline: str, rounds: int) -> tuple[str, ...]:
    """Everything that weakens the verdict, or that it does not show."""
    lines = [line for arm in arms for line in _of_arm(arm.name, arm.summary)]
    lines += _of_pods(arms)
    lines += [line for arm in arms if arm.name != baseline for line in _elsewhere(arm.name, contrasts)]
    lines += contrasts.missing
    if len(arms) > 1 and rounds == 1:
        lines.append(
            "There was one round: the intervals cover which sessions happened to be drawn, not what differs between two"
            " runs of the same arm. Give more rounds for that."
        )
    elif len(arms) > 1 and rounds < 4:
        lines.append(
            f"There were {rounds} rounds: the intervals cover both sessions and rounds, but so few rounds show how much"
            " runs differ only roughly."
        )
    return tuple(lines)


def _of_arm(name: str, summary: Summary) -> list[str]:
    lines = []
    if summary.failed or summary.not_sent:
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary.failures.items())
        lines.append(
            f"{name} failed {summary.failed} of {summary.planned} requests ({reasons or 'none'}) and left"
            f" {summary.not_sent} unsent, {failed_share(summary):.1%} together. Its means are of the survivors;"
            " compared are only requests that both arms completed, and in percentiles a failure is infinitely slow."
        )
    reuse = summary.reuse
    if summary.completed and reuse.cached_token_rate is None:
        lines.append(f"{name}: the answers carry no usage, so nothing is known of its hit rate.")
    if reuse.counters_agree is False:
        lines.append(_disagreement(name, summary))
    if reuse.achieved_share is not None and reuse.attainable_rate is not None:
        found = reuse.achieved_share * reuse.attainable_rate
        if found > reuse.attainable_rate + WARM_START:
            lines.append(
                f"{name} found {found:.0%} of its prompt tokens cached, where its own requests could have left"
                f" {reuse.attainable_rate:.0%} at most: the caches were not empty when a block began, or other traffic"
                " shares these prompts."
            )
    if reuse.duplicate_prompts > MANY_DUPLICATES * summary.planned:
        lines.append(
            f"{name}: {reuse.duplicate_prompts} of {summary.planned} prompts had been sent before, whole, in the same"
            " block. Caches gain from that more than from users, who rarely repeat each other to the letter."
        )
    return lines


def _disagreement(name: str, summary: Summary) -> str:
    usage, counted = summary.reuse.cached_token_rate, summary.reuse.counted_rate
    assert usage is not None
    assert counted is not None
    tokens = sum(pod.counted_prompt_tokens or 0 for pod in summary.pods.values())
    head = f"{name}: usage says that {usage:.1%} of prompt tokens were cached, the pods' counters {counted:.1%}"
    if tokens > (1 + AGREEMENT) * summary.prompt_tokens:
        failed = f" and the {summary.failed} requests that failed" if summary.failed else ""
        why = f"the counters saw {tokens:,} prompt tokens, the answers {summary.prompt_tokens:,}: other traffic{failed}"
    elif tokens < (1 - AGREEMENT) * summary.prompt_tokens:
        why = f"the counters saw {tokens:,} of {summary.prompt_tokens:,} prompt tokens: pods are missing from the list"
    else:
        why = "both saw the same prompt tokens, so the server counts hits differently in the two places"
    return f"{head}; {why}. The verdict goes by usage."


def _of_pods(arms: Sequence[Arm]) -> list[str]:
    unknown = [
        arm.name for arm in arms if arm.summary.completed and not any(p.requests for p in arm.summary.pods.values())
    ]
    if not unknown:
        return []
    return [
        f"{', '.join(unknown)}: the answers do not name the pod, so imbalance between pods is unknown and shown as 1."
    ]


def _elsewhere(name: str, contrasts: Contrasts) -> list[str]:
    """Metrics that go against the verdict: sooner to begin but later to end, faster but with less throughput."""
    first = contrasts.of(name)
    if first is None or first.judgement != "better":
        return []
    against = [c for c in contrasts.found if c.arm == name and c.metric != DECIDES and c.judgement == "worse"]
    return [
        f"{name} begins its answers sooner than {c.baseline}, but its {c.metric} is worse:"
        f" {c.ratio.value:.2f} times that of {c.baseline}."
        for c in against
    ]
