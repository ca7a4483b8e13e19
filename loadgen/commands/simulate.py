"""`warmroute-loadgen simulate`: routers with a whole fleet of emulated pods, in virtual time and one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from engine.common.settings import ConfigError, group, load_or_exit
from loadgen.commands.argv import joined
from loadgen.commands.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from loadgen.commands.finish import check_writable, not_possible, report
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.commands.simulate_events import events_of
from loadgen.commands.simulate_result import simulate_arms
from loadgen.commands.simulate_sweep import RateSweep, simulate_sweep
from loadgen.commands.storable import storable
from loadgen.load.arrivals import ArrivalKind, ArrivalSettings, ArrivalSpec, check_times, mean_turns
from loadgen.output.live import open_progress
from loadgen.output.settings import OutputSettings
from loadgen.simulate.arms import ARM_NAMES
from loadgen.simulate.build import PROFILE_NAMES, emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.scenario import Scenario
from loadgen.single.arm import timed_by
from loadgen.sweep.saturation import check_rate
from loadgen.workloads.base import Workload
from loadgen.workloads.catalog import WorkloadSettings, build_workload, distinct_rounds
from loadgen.workloads.wrappers import Window

PROG = "warmroute-loadgen simulate"
DEFAULT_ARMS = ("round_robin", "least_loaded", "prefix_hash", "cache_aware", "affinity_groups", "predicted_ttft")
LISTS = ("--arms", "--events", "--rates")
"""Flags that take several words."""
SWEEP_ONLY = ("precision", "point_s")


@group(
    "The fleet",
    common=("arms", "baseline", "pods", "profile", "kv_tokens", "sessions", "rounds", "rates", "start_rate"),
)
class SimulateSettings(WorkloadSettings, ArrivalSettings, OutputSettings):
    """A whole fleet of emulated GPU pods in virtual time: our policies, other routers, traces.

    No tokens are computed and nothing is sent. The gateway's decisions, the engine's scheduler and its cache run as in
    production, on pods that take the time their profile gives. The same flags give the same result, bit for bit. A
    workload with its own times (a trace) keeps them unless flags say otherwise. Exit status: 0, 1 if a file cannot be
    written, 2 for bad flags, 3 if no request, or hardly any, completed, 130 on Ctrl-C.
    """

    removed = REMOVED
    removed_in = REMOVED_IN

    config: str | None = Field(None, description="YAML file with any of these settings")
    arms: list[str] = Field(
        list(DEFAULT_ARMS), description=f"routers to compare, comma-separated, any of {', '.join(ARM_NAMES)}"
    )
    baseline: str = Field("", description="arm that the others are compared with; empty: round_robin, else the first")
    pods: int = Field(8, ge=1, le=1024, description="emulated pods, named pod-0 and so on")
    profile: str = Field(
        "h100-8b",
        description=f"profile of a pod: {', '.join(PROFILE_NAMES)}, or a YAML file of `warmroute-engine calibrate`",
    )
    kv_tokens: int | None = Field(None, ge=16, description="tokens of KV a pod holds; none: the profile's")
    max_step_tokens: int = Field(2048, ge=1, description="tokens a pod computes in one step")
    max_running: int = Field(256, ge=1, description="requests that a pod runs at the same time")
    gateways: int = Field(1, ge=1, le=64, description="gateways that take requests in turn; each sees only its own")
    sessions: int = Field(1000, ge=1, le=10_000_000, description="sessions per run, at most; in a sweep, at least")
    rounds: int = Field(
        1,
        ge=1,
        le=10_000,
        description="every arm runs once per round, with the seed after that of the round before; with a data set, each"
        " round plays the next --sessions, if there are more",
    )
    events: list[str] = Field(
        [],
        description="pods that die, join or change their speed to a share of the profile's, and when, in seconds of the"
        " run, comma-separated: pod-3@20=die,pod-9@30=join,pod-2@10=0.5",
    )
    rates: list[float] = Field(
        [], description="a sweep: increasing load, each arm up to its knee, over these requests per second"
    )
    start_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a sweep whose first rate this is, requests per second; it is doubled, then bisected; none: no"
        " sweep, unless --rates lists its steps",
    )
    precision: float = Field(
        0.15, gt=0, le=1, description="relative gap between knee and saturation at which the search ends"
    )
    point_s: float = Field(
        20.0, gt=0, allow_inf_nan=False, description="least duration of a sweep's step, virtual seconds"
    )
    out: str = Field("out/simulate", description="folder for result.json, report.html, report.md, result.csv and PNGs")

    @field_validator("arms")
    @classmethod
    def _check_arms(cls, arms: list[str]) -> list[str]:
        unknown = [arm for arm in arms if arm not in ARM_NAMES]
        if unknown or not arms:
            raise ValueError(f"{', '.join(unknown) or 'an empty list'} is not an arm")
        if len(set(arms)) < len(arms):
            raise ValueError("must name each arm once")
        return arms

    @field_validator("rates")
    @classmethod
    def _check_rates(cls, rates: list[float]) -> list[float]:
        if any(not 0 < rate < float("inf") for rate in rates) or rates != sorted(set(rates)):
            raise ValueError("must be above 0, finite and ascending")
        return rates

    @model_validator(mode="after")
    def _check_simulation(self) -> Self:
        if self.baseline and self.baseline not in self.arms:
            raise ValueError(f"--baseline {self.baseline} is not an arm; arms are {', '.join(self.arms)}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(f"--max-step-tokens must be at least --max-running, which is {self.max_running}")
        self._check_sweep()
        self.fleet()
        return self

    def _check_sweep(self) -> None:
        given = self.model_fields_set
        if not self.is_sweep:
            if wrong := [name for name in SWEEP_ONLY if name in given]:
                raise ValueError(f"{_dashed(wrong[0])} is for a sweep: give --start-rate or --rates")
            return
        if self.rates and (wrong := [name for name in ("start_rate", "precision") if name in given]):
            raise ValueError(f"--rates and {_dashed(wrong[0])} exclude each other: listed rates are all that is tried")
        if self.baseline:
            raise ValueError("--baseline does not go with a sweep: each arm has a curve of its own")
        if wrong := sorted((set(ArrivalSettings.model_fields) | {"rounds"}) & given):
            raise ValueError(f"{_dashed(wrong[0])} does not go with a sweep: arrivals are Poisson at each rate")
        check_rate(max(self.rates, default=self.start_rate or 0.0), self.point_s)

    @property
    def is_sweep(self) -> bool:
        """Return whether the load increases from step to step."""
        return bool(self.rates) or self.start_rate is not None

    def fleet(self) -> FleetSpec:
        """Return the pods and the events of the fleet. Raises ValueError."""
        pods = emulated_pods(
            self.pods,
            self.profile,
            kv_tokens=self.kv_tokens,
            max_step_tokens=self.max_step_tokens,
            max_running=self.max_running,
        )
        return FleetSpec(pods, events_of(self.events, pods))

    def chosen_baseline(self) -> str:
        """Return the arm that the others are compared with."""
        return self.baseline or ("round_robin" if "round_robin" in self.arms else self.arms[0])

    def chosen_seeds(self) -> list[int]:
        """Return the seeds, one for each requested round."""
        return [self.seed + number for number in range(self.rounds)]

    def scenarios(self) -> list[Scenario]:
        """Return the rounds: one for each seed, but at most as many as a data set has different sessions for.

        Raises ConfigError if the workload cannot be played this way.
        """
        made: list[Scenario] = []
        for number, seed in enumerate(self.chosen_seeds()):
            workload = build_workload(self.model_copy(update={"seed": seed}))
            if workload.length == 0:
                raise ConfigError(f"--workload {workload.name} holds no session")
            parts = distinct_rounds(self, workload, self.sessions)
            if parts is not None and number:
                if number >= parts:
                    break
                workload = Window(workload, number * self.sessions, self.sessions)
            made.append(self._scenario(workload, seed))
        return made

    def _scenario(self, workload: Workload, seed: int) -> Scenario:
        arrivals = self._arrivals_for(workload)
        try:
            check_times(arrivals, workload)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        timed = timed_by(workload, arrivals.kind)
        return Scenario(self.fleet(), timed, arrivals, self.sessions, seed, self.gateways)

    def configuration(self) -> dict[str, Any]:
        """Return every setting that has a value."""
        given = self.model_dump()
        return {name: storable(value) for name, value in given.items() if value is not None and name != "config"}

    def _arrivals_for(self, workload: Workload) -> ArrivalSpec:
        if self.is_sweep:
            return ArrivalSpec(ArrivalKind.POISSON)
        has_times = workload.session(0).start_s is not None
        if has_times and not set(ArrivalSettings.model_fields) & self.model_fields_set:
            return ArrivalSpec(ArrivalKind.TRACE)
        return self.arrivals(mean_turns(workload, self.sessions))


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(SimulateSettings, joined(argv, LISTS), PROG)
    try:
        scenarios = settings.scenarios()
        check_writable(settings.out, "--out")
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    shown, baseline = settings.configuration(), settings.chosen_baseline()
    try:
        with open_progress() as progress:
            if settings.is_sweep:
                sweep = RateSweep(settings.rates, settings.start_rate or 1.0, settings.precision, settings.point_s)
                result = simulate_sweep(scenarios[0], settings.arms, sweep, shown, progress)
            else:
                asked = len(settings.chosen_seeds())
                result = simulate_arms(scenarios, settings.arms, baseline, shown, progress, asked)
    except OSError as error:
        print(f"{PROG}: {not_possible(error)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"\n{PROG}: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return report(result, settings, PROG)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
