"""From simulated runs to a Result: every arm plays every seed, then the arms are compared request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from loadgen.experiment.cautions import cautions, unplayed
from loadgen.experiment.contrasts import Contrasts, contrasts, over_rounds
from loadgen.experiment.pairs import pair
from loadgen.experiment.verdict import able_arms, verdict
from loadgen.load.arrivals import mean_turns
from loadgen.load.progress import Progress
from loadgen.measure.definitions import DEFINITIONS
from loadgen.measure.summary import summarise, summarise_runs
from loadgen.result.model import Arm, Result
from loadgen.simulate.build import profile_words
from loadgen.simulate.scenario import Scenario, SimulatedRun, play

ISOLATION = "Every run begins with empty caches and a router that knows nothing."
METHOD = {
    "virtual time": "seconds of the simulation's clock: an emulated pod's step takes what the profile's formula says",
    "step": "max(w0, a + c1 x new tokens) + c2 x sum of t (p + t / 2) over prefill chunks of t tokens after p"
    " + c3 x context tokens of decoding requests + c4 x decoding requests, in milliseconds",
}


def simulate_arms(
    scenarios: Sequence[Scenario],
    arms: Sequence[str],
    baseline: str,
    configuration: Mapping[str, Any],
    progress: Progress,
    asked: int,
) -> Result:
    """Play every arm on every scenario and return the Result. A scenario is a round; the user wanted `asked` rounds.

    Ctrl-C ends it early: complete rounds count, or of the first round the arms that have been played.
    """
    rounds, is_partial = _rounds(scenarios, arms, baseline, progress)
    arms = list(rounds[0])
    pods = scenarios[0].pods()
    made = tuple(_arm(arm, [runs[arm] for runs in rounds], pods) for arm in arms)
    pairs = pair(rounds) if len(arms) > 1 else None
    able = able_arms(made, baseline)
    found = contrasts(pairs, arms, baseline, scenarios[0].seed, able=able) if pairs is not None else Contrasts(())
    found = over_rounds(found, len(rounds))
    return Result(
        command="simulate",
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        model=model_name(scenarios[0]),
        seed=scenarios[0].seed,
        configuration=dict(configuration),
        workload={"name": scenarios[0].workload.name, **scenarios[0].workload.about()},
        facts=facts(scenarios),
        isolation=ISOLATION,
        baseline=baseline,
        order=tuple(arms) * len(rounds),
        arms=made,
        contrasts=found.found,
        partial=is_partial,
        verdict=verdict(made, found, baseline),
        cautions=(
            *partial_rounds(len(rounds), arms, is_partial=is_partial),
            *cautions(made, found, baseline, len(rounds)),
            *(() if is_partial else unplayed(len(rounds), asked)),
        ),
        definitions={**DEFINITIONS, **METHOD},
    )


def _rounds(
    scenarios: Sequence[Scenario], arms: Sequence[str], baseline: str, progress: Progress
) -> tuple[list[dict[str, SimulatedRun]], bool]:
    """Return the rounds, each by arm, and whether Ctrl-C ended them early."""
    rounds: list[dict[str, SimulatedRun]] = []
    for scenario in scenarios:
        played: dict[str, SimulatedRun] = {}
        try:
            for arm in arms:
                played[arm] = play_watched(scenario, arm, progress)
        except KeyboardInterrupt:
            if not rounds and baseline not in played:
                raise
            return rounds or [played], True
        rounds.append(played)
    return rounds, False


def partial_rounds(rounds: int, arms: Sequence[str], *, is_partial: bool) -> tuple[str, ...]:
    """Return a line for the user if Ctrl-C ended the rounds early."""
    if not is_partial:
        return ()
    return (f"PARTIAL: stopped early, after {rounds} round{'s' if rounds > 1 else ''} of {', '.join(arms)}.",)


def play_watched(scenario: Scenario, arm: str, progress: Progress) -> SimulatedRun:
    """Call `play` and show its progress."""
    length = scenario.workload.length
    sessions = scenario.sessions if length is None else min(scenario.sessions, length)
    progress.arm_started(arm, round(sessions * mean_turns(scenario.workload, sessions)))
    try:
        return play(scenario, arm, progress.request_ended)
    finally:
        progress.arm_ended()


def model_name(scenario: Scenario) -> str:
    """Return the text that a result has in place of the model's name."""
    return f"emulated {scenario.fleet.pods[0].profile.name}"


def facts(scenarios: Sequence[Scenario]) -> dict[str, str]:
    """Return the facts behind the run: the whole profile first, because its constants decide the headline."""
    first = scenarios[0]
    fleet, pod = first.fleet, first.fleet.pods[0]
    return {
        f"profile {pod.profile.name}": profile_words(pod),
        "pods": f"{len(fleet.pods)}, {pod.kv_tokens:,} tokens of KV each in blocks of"
        f" {pod.block_size}, {pod.max_step_tokens} tokens a step, {pod.max_running} requests at a time",
        "gateways": f"{first.gateways}, an event reaches them {fleet.event_delay_s * 1e3:g} ms after it is published,"
        f" a request reaches a pod after {fleet.network_s * 1e3:g} ms",
        "events": "; ".join(
            f"{fault.pod} {fault.kind} at {fault.at_s:g} s" + (f" to {fault.speed:g}" if fault.kind == "slow" else "")
            for fault in fleet.faults
        )
        or "none",
        "arrivals": first.arrivals.about(),
        "seeds": ", ".join(str(scenario.seed) for scenario in scenarios),
    }


def _arm(name: str, runs: Sequence[SimulatedRun], pods: Sequence[str]) -> Arm:
    each = tuple(summarise(run, pods, in_brief=True) for run in runs)
    return Arm(name=name, url="", policy=name, summary=summarise_runs(runs, pods), blocks=each)
