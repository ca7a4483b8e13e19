"""From the steps of a sweep to a Result: curves, the knee of each arm, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from loadgen.experiment.cautions import cautions
from loadgen.experiment.contrasts import Contrasts
from loadgen.measure.definitions import DEFINITIONS
from loadgen.result.model import Arm, Result, Summary, SweepPoint
from loadgen.sweep.run import Curve, Sweep, step_of
from loadgen.sweep.saturation import MIN_ACHIEVED_SHARE, MIN_GAIN_SHARE, MIN_GOOD_SHARE, TTFT_GROWTH


def sweep_result(sweep: Sweep, configuration: Mapping[str, Any]) -> Result:
    """Return the Result. An arm's own numbers are those of its knee, or of its lowest step if that saturates."""
    plan = sweep.plan
    assert sweep.isolation is not None
    curves = [curve for curve in sweep.curves if curve.points]
    arms = [_arm(curve) for curve in curves]
    return Result(
        command="sweep",
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        model=sweep.model,
        seed=plan.load.seed,
        configuration=dict(configuration),
        workload={"name": plan.workload.name, **plan.workload.about()},
        facts={"tokens per word": ", ".join(dict.fromkeys(f"{c.arm.tokens_per_word:g}" for c in curves))},
        isolation=sweep.isolation.about.replace("block", "step"),
        baseline=arms[0].name,
        arms=tuple(arms),
        sweep=tuple(_brief(point) for curve in curves for point in sorted(curve.points, key=step_of)),
        partial=sweep.is_interrupted,
        verdict=tuple(_verdict(curve, sweep) for curve in curves),
        cautions=(*_cut_short(sweep), *_cautions(sweep, arms)),
        definitions={**DEFINITIONS, **_rules()},
    )


def knee(curve: Curve) -> SweepPoint | None:
    """Return the highest step below every saturated one; None if the lowest saturates."""
    good = curve.search.good
    return next((point for point in curve.points if good is not None and step_of(point) == good), None)


def best(curve: Curve) -> SweepPoint:
    """Return the step with the most good requests per second, saturated or not."""
    return max(curve.points, key=lambda point: _served(point.summary))


def _cut_short(sweep: Sweep) -> tuple[str, ...]:
    if not sweep.is_interrupted:
        return ()
    points = sum(len(curve.points) for curve in sweep.curves)
    return (f"PARTIAL: stopped early, with {points} steps measured; higher and lower ones are missing.",)


def _arm(curve: Curve) -> Arm:
    point = knee(curve) or min(curve.points, key=step_of)
    spec = curve.arm.spec
    return Arm(name=spec.name, url=spec.url, policy=spec.policy, summary=point.summary)


def _brief(point: SweepPoint) -> SweepPoint:
    return point.model_copy(update={"summary": point.summary.model_copy(update={"series": None})})


def _served(summary: Summary) -> float:
    return summary.goodput.request_goodput if summary.goodput else summary.request_throughput


def _verdict(curve: Curve, sweep: Sweep) -> str:
    words, name = sweep.plan.steps.words, curve.arm.spec.name
    found, top, bad = knee(curve), best(curve), curve.search.bad
    most = f"most good requests per second: {_served(top.summary):.3g}, at {words(step_of(top))}"
    if not top.summary.goodput:
        most = f"most completed requests per second: {_served(top.summary):.3g}, at {words(step_of(top))}"
    if found is None:
        assert bad is not None
        return f"{name} keeps up with no step that was tried, not even {words(bad)} ({curve.reasons[bad]}); {most}."
    if bad is None:
        return f"{name} keeps up with {words(step_of(found))}, the highest step that was tried; {most}."
    return f"{name} keeps up with {words(step_of(found))}, not with {words(bad)} ({curve.reasons[bad]}); {most}."


def _cautions(sweep: Sweep, arms: list[Arm]) -> tuple[str, ...]:
    lines = list(cautions(arms, Contrasts(()), arms[0].name, 4))
    if sweep.is_cut_short:
        lines.append(f"--max-time {sweep.plan.max_time_s:g} s ended the sweep: a knee may be higher, or less exact.")
    without = [curve.arm.spec.name for curve in sweep.curves if not curve.points]
    if without:
        lines.append(f"No step of {', '.join(without)} fitted into --max-time.")
    if sweep.is_unconfirmed:
        lines.append("A saturated step ran only once: a stall of the machine would look the same.")
    return (*lines, *(note for curve in sweep.curves for note in curve.arm.notes))


def _rules() -> dict[str, str]:
    return {
        "saturated": f"less than {MIN_GOOD_SHARE:.0%} of offered requests good (without --goodput: completed); or they"
        f" end at less than {MIN_ACHIEVED_SHARE:.0%} of the rate at which they are due, as the growth of median"
        f" latency from the first to the second half of the step shows; over concurrency: throughput grew by less than"
        f" {MIN_GAIN_SHARE:.0%} of the proportion by which concurrency grew; or p99 of TTFT is over {TTFT_GROWTH:g}"
        " times that of the lowest step",
        "knee": "the highest step below every saturated one; an arm's numbers are those of its knee",
    }
