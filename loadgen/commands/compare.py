"""`warmroute-loadgen compare`: policies of one gateway, or deployments, against each other."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.contract.settings import ConfigError, load_or_exit
from loadgen.commands.argv import joined
from loadgen.experiment.arms import DEFAULT_POLICIES, ArmSpec, arms_of, baseline_of
from loadgen.experiment.plan import Plan, Round
from loadgen.experiment.report import Configuration, result_of
from loadgen.experiment.run import Experiment
from loadgen.experiment.stopping import Stopping
from loadgen.interrupt import run_interruptible
from loadgen.load.arrivals import ArrivalSettings, check_times, mean_turns
from loadgen.load.target import ServerUnusable, Target
from loadgen.load.workers import WorkerDied
from loadgen.measure.goodput import parse_objectives
from loadgen.output.live import open_progress
from loadgen.output.save import save
from loadgen.output.settings import OutputSettings
from loadgen.output.terminal import print_result, result_console
from loadgen.result.model import Result
from loadgen.workloads.base import Workload
from loadgen.workloads.catalog import WorkloadSettings, build_workload
from loadgen.workloads.kinds import KINDS

PROG = "warmroute-loadgen compare"
EXIT_FAILED, EXIT_INVALID, EXIT_INTERRUPTED = 1, 3, 130
SECRETS = ("api_key", "header")
LISTS = ("--goodput", "--arm", "--policies", "--metrics-urls", "--header")
"""Flags that take several words."""


class CompareSettings(WorkloadSettings, ArrivalSettings, OutputSettings):
    """Flags, `WARMROUTE_*` environment and YAML keys of `warmroute-loadgen compare`.

    Exit status: 0 (also where nothing is distinguishable), 1 where an arm cannot be measured, 2 for bad flags, 3 where
    the run is invalid, 130 on Ctrl-C; whole rounds are reported all the same.
    """

    config: str | None = Field(None, description="YAML file with any of these settings")
    url: str = Field("", description="base URL of a gateway that runs with --allow-policy-header: an arm per policy")
    policies: list[str] = Field(
        [], description=f"routing policies of --url to compare, comma-separated; none: {', '.join(DEFAULT_POLICIES)}"
    )
    arm: list[str] = Field(
        [], description="a deployment as NAME=URL, or NAME=URL;POLICY; repeatable, beside or instead of --url"
    )
    baseline: str = Field(
        "", description="arm that the others are measured against; empty: round_robin, else the first"
    )
    metrics_urls: list[str] = Field(
        [],
        description="a pod's address, or ARM=address, to reset its cache and read its counters; repeatable; none: those"
        " that the gateway lists",
    )
    model: str = Field("", description="model to name in requests; empty: the first of /v1/models")
    endpoint: Literal["chat", "completions"] = Field("chat", description="OpenAI endpoint")
    api_key: str = Field("", description="sent as 'authorization: Bearer ...'")
    header: list[str] = Field([], description="NAME=VALUE, a further header field of each request; repeatable")
    ignore_eos: bool = Field(True, description="ask for answers of exact length; off for servers that refuse the field")
    tokens_per_word: float = Field(0.0, ge=0, le=100, description="tokens per word of the model; 0: measured at start")

    sessions: int = Field(50, ge=0, le=10_000_000, description="sessions of each block; 0: all that the data set has")
    time_limit_s: float = Field(300.0, gt=0, description="seconds after which a block is cut off")
    request_timeout_s: float = Field(60.0, gt=0, description="seconds a request may take as a whole")
    max_concurrency: int | None = Field(
        None, ge=1, description="requests under way at most; the wait of others counts as latency; none: no limit"
    )
    workers: int = Field(1, ge=1, le=256, description="processes that send")
    warmup_requests: int = Field(8, ge=1, le=1000, description="short requests before each block, not counted")
    settle_s: float = Field(1.0, ge=0, description="seconds of rest between emptying the caches and a block")

    precision: float = Field(
        0.1, gt=0, description="rounds are added until half the interval of the ratio of mean TTFT is this share of it"
    )
    rounds: int | None = Field(
        None, ge=1, description="exactly this many rounds, whatever the precision; none: see there"
    )
    max_rounds: int = Field(10, ge=2, description="most rounds for --precision")
    max_time: float = Field(1800.0, gt=0, description="seconds; no round starts that would end later, but the first")
    goodput: list[str] = Field(
        [], description="objectives in ms, any of ttft:500 tpot:50 e2el:5000; goodput is over all requests offered"
    )
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

    def arms(self) -> tuple[ArmSpec, ...]:
        """What is compared. Raises ValueError."""
        return arms_of(self.url, self.policies, self.arm, self.metrics_urls)

    def target(self, arm: ArmSpec) -> Target:
        """How an arm is reached. Raises ValueError."""
        fields = [text.partition("=") for text in self.header]
        if bad := [name for name, has_value, _ in fields if not (name and has_value)]:
            raise ValueError(f"--header {bad[0]!r} must be NAME=VALUE")
        return Target(
            url=arm.url,
            endpoint=self.endpoint,
            model=self.model,
            policy=arm.policy,
            api_key=self.api_key,
            headers={name: value for name, _, value in fields},
            extra={"ignore_eos": True} if self.ignore_eos else {},
            timeout_s=self.request_timeout_s,
        )

    def configuration(self) -> Configuration:
        """Every setting that has a value, with secrets replaced."""
        given = {name: value for name, value in self.model_dump().items() if value is not None and name != "config"}
        hidden = {name: "(given)" for name in SECRETS if given[name]}
        return {name: str(value) if value == float("inf") else value for name, value in (given | hidden).items()}


def make_plan(settings: CompareSettings) -> tuple[Plan, Workload]:
    """The plan, and the first round's workload. Raises ConfigError where a data set or its times cannot be used."""
    workload = build_workload(settings)
    sessions = settings.sessions or None
    try:
        arrivals = settings.arrivals(mean_turns(workload, sessions or workload.length or 1))
        check_times(arrivals, workload)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parts = _parts(settings, workload)
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
        stopping=Stopping(settings.precision, settings.max_rounds, settings.max_time, settings.rounds),
        distinct_rounds=parts,
        tokens_per_word=settings.tokens_per_word,
        max_in_flight=settings.max_concurrency,
        workers=settings.workers,
        warmup_requests=settings.warmup_requests,
        settle_s=settings.settle_s,
        objectives_ms=parse_objectives(settings.goodput),
    )
    return plan, workload


def run(argv: Sequence[str]) -> int:
    """The exit status; exits with 2 on bad flags."""
    settings = load_or_exit(CompareSettings, joined(argv, LISTS), PROG)
    try:
        plan, workload = make_plan(settings)
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
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
    if status:
        print(f"{PROG}: {experiment.stopped}; {_kept(experiment)}", file=sys.stderr)
    if not experiment.rounds:
        return status
    result = result_of(
        experiment, settings.configuration(), {"name": workload.name, **workload.about()}, _facts(settings)
    )
    return (
        _show(result, settings) or status or (0 if all(a.summary.validity.valid for a in result.arms) else EXIT_INVALID)
    )


def _show(result: Result, settings: CompareSettings) -> int:
    """Print and save: 0, or 1 where the folder cannot be written."""
    screen = result_console()
    print_result(result, screen)
    try:
        paths = save(result, settings.folder, settings.chosen_formats())
    except OSError as error:
        print(f"{PROG}: --out cannot be written: {error}", file=sys.stderr)
        return EXIT_FAILED
    for path in paths.all():
        screen.print(str(path), markup=False, soft_wrap=True)
    return 0


def _kept(experiment: Experiment) -> str:
    whole = len(experiment.rounds)
    if not whole:
        return "no round was complete, so there is no report"
    return "1 whole round is reported" if whole == 1 else f"{whole} whole rounds are reported"


def _parts(settings: CompareSettings, workload: Workload) -> int | None:
    """Rounds of different sessions that a data set has; None: as many as are wanted."""
    if not KINDS[settings.workload].reads_file or workload.length is None:
        return None
    return max(1, workload.length // (settings.sessions or workload.length))


def _rounds(settings: CompareSettings, workload: Workload, parts: int | None) -> Callable[[int], Round]:
    def round_of(number: int) -> Round:
        if parts is not None:
            return Round(workload, number % parts * settings.sessions)
        return Round(build_workload(settings.model_copy(update={"seed": settings.seed + number})))

    return round_of


def _facts(settings: CompareSettings) -> dict[str, str]:
    processes = "1 process" if settings.workers == 1 else f"{settings.workers} processes"
    return {"load generator": f"{processes} on {platform.system()} with {os.cpu_count()} CPUs"}
