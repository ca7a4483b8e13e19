"""`warmroute-loadgen compare`: policies of one gateway, or several deployments, against each other."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.common.settings import ConfigError, Settings, group, load_or_exit
from loadgen.commands.argv import joined
from loadgen.commands.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from loadgen.commands.finish import check_writable, not_possible, report
from loadgen.commands.interrupt import run_interruptible
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.commands.server_settings import RequestSettings
from loadgen.experiment.arms import DEFAULT_POLICIES, ArmSpec, arms_of, baseline_of
from loadgen.experiment.plan import Plan, Round
from loadgen.experiment.report import result_of
from loadgen.experiment.run import Experiment
from loadgen.experiment.stopping import Stopping
from loadgen.load.arrivals import ArrivalSettings, check_times, mean_turns
from loadgen.load.target import ServerUnusable, Target
from loadgen.load.workers import WorkerDied
from loadgen.measure.goodput import parse_objectives
from loadgen.output.live import open_progress
from loadgen.output.screen import progress_screen
from loadgen.output.settings import OutputSettings
from loadgen.output.style.units import printable
from loadgen.workloads.base import Workload
from loadgen.workloads.catalog import WorkloadSettings, build_workload, distinct_rounds
from loadgen.workloads.kinds import KINDS

PROG = "warmroute-loadgen compare"
LISTS = ("--goodput", "--arm", "--policies", "--metrics-urls", "--admin-url", "--header")
"""Flags that take several words."""
MAX_ROUNDS = 10
"""Most rounds for --precision: five pairs halve the interval of the first, and a further one hardly narrows it."""
WARMUPS = 8
"""Short requests before each block, not counted: each pod of a small fleet gets one, and opens its connections."""
SETTLE_S = 1.0
"""Seconds of rest between emptying the caches and a block: gateways hear within 50 ms that a cache is empty."""


@group(
    "What is compared", common=("url", "policies", "arm", "baseline", "admin_url", "sessions", "rounds", "precision")
)
class ComparedSettings(Settings):
    """Mixin: the arms to compare."""

    url: str = Field(
        "", description="base URL of a gateway that runs with --allow-policy-header; each policy is an arm"
    )
    policies: list[str] = Field(
        [], description=f"routing policies of --url to compare, comma-separated; none: {', '.join(DEFAULT_POLICIES)}"
    )
    arm: list[str] = Field(
        [], description="a deployment as NAME=URL, or NAME=URL;POLICY; repeatable, with or instead of --url"
    )
    baseline: str = Field("", description="arm that the others are compared with; empty: round_robin, else the first")
    metrics_urls: list[str] = Field(
        [],
        description="a pod's address, or ARM=address, to reset its cache and read its counters; repeatable; none: those"
        " that the gateway lists",
    )
    admin_url: list[str] = Field(
        [],
        description="address of a gateway's --admin-port, or ARM=address: it lists the pods and resets their caches; "
        "repeatable; none: the address of requests",
    )
    sessions: int = Field(50, ge=0, le=10_000_000, description="sessions of each block; 0: all that the data set has")
    precision: float = Field(
        0.1,
        gt=0,
        description="rounds are added until the ratio of mean TTFT is known to plus or minus this share of the ratio",
    )
    rounds: int | None = Field(None, ge=1, description="exactly this many rounds; none: as many as --precision needs")
    max_time: float = Field(
        1800.0, gt=0, description="seconds; except for the first, no round starts that would end later"
    )

    def arms(self) -> tuple[ArmSpec, ...]:
        """Return the arms to compare. Raises ValueError."""
        return arms_of(self.url, self.policies, self.arm, self.metrics_urls, self.admin_url)


@group("Requests")
class CompareSettings(OutputSettings, WorkloadSettings, ArrivalSettings, RequestSettings, ComparedSettings):
    """Policies of a gateway, or deployments, against each other: the same prompts and schedule, in ABBA order.

    Exit status: 0 (also if nothing is distinguishable), 1 if an arm cannot be measured, 2 for bad flags, 3 if the run
    is invalid, 130 on Ctrl-C, which keeps whole rounds; of the first round, what has been measured.
    """

    removed = REMOVED
    removed_in = REMOVED_IN

    endpoint: Literal["chat", "completions"] = Field("chat", description="OpenAI endpoint")
    time_limit_s: float = Field(300.0, gt=0, description="seconds after which a block is cut off")
    request_timeout_s: float = Field(60.0, gt=0, description="seconds a request may take as a whole")
    out: str = Field("out/compare", description="folder for result.json, report.html, report.md, result.csv and PNGs")

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        arms = self.arms()
        baseline_of(arms, self.baseline)
        parse_objectives(self.goodput)
        for arm in arms:
            self.target(arm)
        if self.sessions == 0 and not KINDS[self.workload].reads_file:
            raise ValueError(f"--sessions 0 needs a data set; --workload {self.workload} has no end")
        return self

    def target(self, arm: ArmSpec) -> Target:
        """Return how an arm is reached. Raises ValueError."""
        return self.target_of(arm, self.endpoint)


def make_plan(settings: CompareSettings) -> tuple[Plan, Workload]:
    """Return the plan and the first round's workload. Raises ConfigError if a data set or its times cannot be used."""
    workload = build_workload(settings)
    sessions = settings.sessions or None
    try:
        arrivals = settings.arrivals(mean_turns(workload, sessions or workload.length or 1))
        check_times(arrivals, workload)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parts = distinct_rounds(settings, workload, settings.sessions)
    arms = settings.arms()
    plan = Plan(
        arms=arms,
        baseline=baseline_of(arms, settings.baseline),
        target=settings.target,
        round=_rounds(settings, workload, parts),
        arrivals=arrivals,
        sessions=sessions,
        seed=settings.seed,
        time_limit_s=settings.time_limit_s,
        stopping=Stopping(settings.precision, MAX_ROUNDS, settings.max_time, settings.rounds),
        distinct_rounds=parts,
        tokens_per_word=settings.tokens_per_word,
        max_in_flight=settings.max_concurrency,
        workers=settings.workers,
        warmup_requests=WARMUPS,
        settle_s=SETTLE_S,
        objectives_ms=parse_objectives(settings.goodput),
    )
    return plan, workload


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(CompareSettings, joined(argv, LISTS), PROG)
    try:
        plan, workload = make_plan(settings)
        check_writable(settings.out, "--out")
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    status = 0
    with open_progress() as progress:
        experiment = Experiment(plan, progress)
        try:
            run_interruptible(experiment.run())
        except (ServerUnusable, WorkerDied) as error:
            experiment.stopped = str(error)
            status = EXIT_FAILED
        except OSError as error:
            experiment.stopped = not_possible(error)
            status = EXIT_FAILED
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
    if status:
        progress_screen().out(printable(f"{PROG}: {experiment.stopped}; {_kept(experiment)}"), highlight=False)
    if not experiment.kept:
        return status
    about = {"name": workload.name, **workload.about()}
    result = result_of(experiment, settings.configuration(), about, _facts(settings))
    shown = report(result, settings, PROG)
    return EXIT_FAILED if shown == EXIT_FAILED else status or shown


def _kept(experiment: Experiment) -> str:
    whole = len(experiment.rounds)
    if not experiment.kept:
        return "no request had ended, so there is no report"
    if not whole:
        return f"no round was complete, so the report is of what {' and '.join(experiment.begun)} had measured"
    return "1 whole round is reported" if whole == 1 else f"{whole} whole rounds are reported"


def _rounds(settings: CompareSettings, workload: Workload, parts: int | None) -> Callable[[int], Round]:
    def round_of(number: int) -> Round:
        if parts is not None:
            return Round(workload, number % parts * settings.sessions)
        return Round(build_workload(settings.model_copy(update={"seed": settings.seed + number})))

    return round_of


def _facts(settings: CompareSettings) -> dict[str, str]:
    processes = "1 process" if settings.workers == 1 else f"{settings.workers} processes"
    return {"load generator": f"{processes} on {platform.system()} with {os.cpu_count()} CPUs"}
