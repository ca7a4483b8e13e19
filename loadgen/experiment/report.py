"""From blocks to a Result, the source of every output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import numpy as np

from loadgen.experiment.cautions import cautions, repeated
from loadgen.experiment.contrasts import (
    CONFIDENCE,
    DECIDES,
    SMALL_EFFECT,
    Contrasts,
    contrasts,
    joint_confidence,
    over_rounds,
)
from loadgen.experiment.lateness import MOST_LAG_SHARE, SHARE_OF_INTERVAL, judged
from loadgen.experiment.pairs import pair
from loadgen.experiment.plan import Block
from loadgen.experiment.run import Experiment
from loadgen.experiment.stopping import counted_rounds
from loadgen.experiment.verdict import able_arms, verdict
from loadgen.measure.definitions import DEFINITIONS
from loadgen.measure.summary import summarise, summarise_runs
from loadgen.measure.validity import LATE_TWICE, MAX_LAG_SHARE
from loadgen.result.model import Arm, Result, Summary

SHOWN_PROBLEMS = 3
Configuration = Mapping[str, str | int | float | bool | list[str] | None]


def result_of(
    experiment: Experiment, configuration: Configuration, workload: Mapping[str, str], facts: Mapping[str, str]
) -> Result:
    """Return the Result of what `experiment` has kept, which must be at least one block."""
    plan, kept = experiment.plan, experiment.kept
    arms = tuple(
        _arm(spec.name, spec.url, spec.policy, [blocks[spec.name] for blocks in kept], experiment)
        for spec in plan.arms
        if spec.name in kept[0]
    )
    pairs = pair([{name: b.run for name, b in blocks.items()} for blocks in kept], plan.objectives_ms)
    names = [arm.name for arm in arms]
    baseline = plan.baseline if plan.baseline in names else names[0]
    found = (
        contrasts(
            pairs,
            names,
            baseline,
            plan.seed,
            able=able_arms(arms, baseline),
            has_objectives=bool(plan.objectives_ms),
        )
        if pairs is not None
        else Contrasts(())
    )
    arms = judged(arms, found, baseline)
    rounds = len(experiment.rounds)
    found = over_rounds(found, len(kept))
    assert experiment.isolation is not None
    return Result(
        command="compare",
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        model=experiment.model,
        seed=plan.seed,
        configuration=dict(configuration),
        workload=dict(workload),
        facts={
            "arrivals": plan.arrivals.about(),
            "rounds": f"{rounds}; {experiment.stopped}",
            "tokens per word": f"{experiment.tokens_per_word:g}",
            **facts,
        },
        isolation=experiment.isolation.about,
        baseline=baseline,
        order=tuple(experiment.order or kept[0]),
        arms=arms,
        contrasts=found.found,
        partial=experiment.is_partial,
        verdict=verdict(arms, found, baseline),
        cautions=(
            *_cut_short(experiment),
            *cautions(arms, found, baseline, len(kept)),
            *repeated(plan.distinct_rounds, rounds),
            *_unread(experiment.problems),
        ),
        definitions={**DEFINITIONS, **_method(len(arms))},
    )


def _cut_short(experiment: Experiment) -> tuple[str, ...]:
    """Return a line for the user if the experiment ended early: what the figures are of."""
    if not experiment.is_partial:
        return ()
    if experiment.rounds:
        return (f"PARTIAL: stopped early ({experiment.stopped}), after {counted_rounds(len(experiment.rounds))}.",)
    ended = "; ".join(
        f"{name} {len(block.run.records):,} of {block.run.planned:,}" for name, block in experiment.begun.items()
    )
    return (
        f"PARTIAL: stopped early ({experiment.stopped}), in the first round. The figures are of the requests that had"
        f" ended: {ended}.",
    )


def _unread(problems: Sequence[str]) -> tuple[str, ...]:
    if not problems:
        return ()
    more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    return (f"The pods' counters do not confirm the hit rate: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}.",)


def _arm(name: str, url: str, policy: str, blocks: Sequence[Block], experiment: Experiment) -> Arm:
    pods, objectives_ms = sorted(experiment.pods[url]), experiment.plan.objectives_ms
    each = [summarise(block.run, pods, objectives_ms, block.counted) for block in blocks]
    low, high = _band(each)
    return Arm(
        name=name,
        url=url,
        policy=policy,
        summary=summarise_runs(
            [b.run for b in blocks],
            pods,
            objectives_ms,
            [b.counted for b in blocks],
            is_compared=len(experiment.plan.arms) > 1,
        ),
        blocks=tuple(_brief(summary) for summary in each),
        ttft_cdf_low_ms=low,
        ttft_cdf_high_ms=high,
    )


def _band(blocks: Sequence[Summary]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lowest and the highest of the blocks' quantiles; the pooled ones lie between them. Empty with one
    block."""
    cdfs = np.array([summary.ttft.cdf_ms for summary in blocks if summary.ttft.cdf_ms])
    if len(cdfs) < 2:
        return (), ()
    return tuple(cdfs.min(axis=0).tolist()), tuple(cdfs.max(axis=0).tolist())


def _brief(summary: Summary) -> Summary:
    """Return the summary without the data that only plots need."""
    without = {
        name: getattr(summary, name).model_copy(update={"cdf_ms": ()})
        for name in ("ttft", "ttft_from_send", "itl", "e2e")
    }
    return summary.model_copy(update={**without, "series": None})


def _method(arms: int) -> dict[str, str]:
    return {
        "contrast": "an arm compared with the baseline over requests paired by round, session and turn. Means: requests"
        " that both completed. Percentiles and goodput: all requests of sessions that both began; failed ones count"
        " as infinitely slow",
        "interval": f"{joint_confidence(arms):.2%} confidence for each interval, so that those of one metric hold for"
        f" all arms together in {CONFIDENCE:.0%} of experiments (Bonferroni): a bootstrap over rounds and the sessions"
        " in them, widened by Student's t for few sessions and for differences between blocks that their sessions do"
        " not explain. With one round it covers only sessions, so nothing is judged",
        "judgement": f"better or worse if the ratio's interval excludes 1 and the effect is at least"
        f" {SMALL_EFFECT - 1:.0%}. The verdict rests on {DECIDES}; of the many other comparisons, some err by chance",
        "validity": "an arm is invalid if the generator's lag may have moved the logarithm of the ratio of mean TTFT"
        f" by more than {MAX_LAG_SHARE:.0%} of the size of the logarithm that is claimed (taken as 1 if it is larger,"
        f" or if no difference is claimed) and by more than {SHARE_OF_INTERVAL:.0%} of half its interval, or by more"
        f" than {MOST_LAG_SHARE:g}. The lag counts {LATE_TWICE:g} times, because reading is about as late as sending,"
        " and the other arm is assumed to have none",
    }
