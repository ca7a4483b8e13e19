"""`warmroute-loadgen sweep`: increasing load until the server no longer keeps up; policies side by side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from pydantic import Field, field_validator, model_validator

from engine.common.settings import ConfigError, group, load_or_exit
from loadgen.commands.argv import joined
from loadgen.commands.finish import check_writable, drive, report
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.commands.server_settings import LISTS, ServerSettings
from loadgen.load.arrivals import ArrivalKind
from loadgen.load.player import take_cancellation
from loadgen.load.progress import Progress
from loadgen.output.settings import OutputSettings
from loadgen.result.model import Result
from loadgen.single.arm import timed_by
from loadgen.sweep.result import sweep_result
from loadgen.sweep.run import Steps, Sweep, SweepPlan
from loadgen.sweep.saturation import MOST_REQUESTS, check_rate
from loadgen.workloads.catalog import WorkloadSettings, build_workload

PROG = "warmroute-loadgen sweep"
MOST_RATE = 10_000.0
"""Highest rate that a search tries, requests per second: more than one load generator sends."""
SETTLE_S = 1.0
"""Seconds of rest between emptying the caches and a step: gateways hear within 50 ms that a cache is empty."""


@group("Steps", common=("policies", "rates", "start_rate", "concurrencies", "num_prompts", "precision", "max_time"))
class SweepSettings(OutputSettings, WorkloadSettings, ServerSettings):
    """Rising rate or concurrency up to the knee, and the highest goodput.

    A step is saturated in three cases: less than 90 % of its requests were good; they end at less than 95 % of the
    offered rate (over concurrency: more requests at a time bring hardly more throughput); or p99 of TTFT explodes. The
    knee is the highest step below every saturated one. Exit status: 0, 1 if the server cannot be measured, 2 for bad
    flags, 3 if a knee's numbers are invalid, 130 on Ctrl-C.
    """

    removed = REMOVED
    removed_in = REMOVED_IN

    policies: list[str] = Field(
        [],
        description="routing policies to request from a warmroute gateway, comma-separated, one curve each",
    )
    rates: list[float] = Field(
        [], description="requests per second to try, comma-separated; none: --start-rate doubled, then bisected"
    )
    start_rate: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="first rate, requests per second; halved if it saturates"
    )
    concurrencies: list[int] = Field(
        [], description="sweep over concurrent sessions instead: the steps, comma-separated"
    )
    precision: float = Field(
        0.15, gt=0, le=1, description="bisect until the first saturated step is within this share of the last good one"
    )
    burstiness: float = Field(1.0, gt=0, description="shape of the gaps: 1 Poisson, below 1 burstier, inf constant")
    num_prompts: int = Field(100, ge=1, le=10_000_000, description="least number of requests per step")
    point_s: float = Field(
        20.0, gt=0, allow_inf_nan=False, description="least time over which a step's requests are due, seconds"
    )
    max_time: float = Field(
        1800.0, gt=0, description="seconds; except for the first, no step starts that would end later"
    )
    num_warmups: int = Field(8, ge=0, le=1000, description="short requests before each step, all at once, not counted")
    time_limit_s: float = Field(300.0, gt=0, description="seconds after which a step is cut off")
    out: str = Field("out/sweep", description="folder for result.json, report.html, report.md, result.csv and PNGs")

    @field_validator("rates", "concurrencies")
    @classmethod
    def _check_steps(cls, steps: list[float]) -> list[float]:
        if any(not 0 < step < float("inf") for step in steps) or steps != sorted(set(steps)):
            raise ValueError("must be above 0, finite and ascending")
        return steps

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        over_rate = [n for n in ("rates", "start_rate", "burstiness", "point_s") if n in self.model_fields_set]
        if self.over_concurrency and over_rate:
            raise ValueError(f"--{over_rate[0].replace('_', '-')} is for a sweep over rates, not over concurrency")
        listed = "--rates" if self.rates else "--concurrencies" if self.concurrencies else ""
        searching = [n for n in ("start_rate", "precision") if n in self.model_fields_set]
        if listed and searching:
            unused = searching[0].replace("_", "-")
            raise ValueError(f"{listed} and --{unused} exclude each other: listed steps are all that is tried")
        if not self.over_concurrency:
            check_rate(max(self.rates, default=self.start_rate), self.point_s)
        at_once = max(self.concurrencies, default=1)
        if at_once > MOST_REQUESTS // 10:
            raise ValueError(f"{at_once} sessions at a time are over {MOST_REQUESTS // 10:,}")
        if len(set(self.policies)) < len(self.policies) or not all(self.policies):
            raise ValueError("--policies must name each policy once, and no empty one")
        return self

    @property
    def over_concurrency(self) -> bool:
        """Return whether steps are numbers of concurrent sessions."""
        return bool(self.concurrencies)

    def steps(self) -> Steps:
        """Return the steps that the sweep tries."""
        if self.over_concurrency:
            return Steps(ArrivalKind.CLOSED, 1.0, [float(c) for c in self.concurrencies])
        most = min(MOST_RATE, MOST_REQUESTS / self.point_s)
        return Steps(ArrivalKind.GAMMA, self.start_rate, self.rates, most=most, burstiness=self.burstiness)


def plan(settings: SweepSettings) -> SweepPlan:
    """Return everything that decides a sweep. Raises ConfigError."""
    steps = settings.steps()
    workload = timed_by(build_workload(settings), steps.kind)
    names = settings.policies or [""]
    arms = [settings.arm(name or "server", name) for name in names]
    return SweepPlan(
        arms=tuple((arm, settings.target(arm)) for arm in arms),
        load=settings.load_spec(settings.seed, SETTLE_S),
        workload=workload,
        steps=steps,
        precision=settings.precision,
        prompts=settings.num_prompts,
        point_s=settings.point_s,
        max_time_s=settings.max_time,
        time_limit_s=settings.time_limit_s,
        max_in_flight=settings.max_concurrency,
    )


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(SweepSettings, joined(argv, LISTS), PROG)
    try:
        what = plan(settings)
        check_writable(settings.out, "--out")
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2

    async def work(progress: Progress) -> Result:
        sweep = Sweep(what, progress, asyncio.get_running_loop().time)
        async with AsyncExitStack() as stack:
            try:
                await sweep.run(stack)
            except asyncio.CancelledError:
                if not sweep.has_points:
                    raise
                sweep.is_interrupted = take_cancellation()
        return sweep_result(sweep, settings.configuration())

    result, status = drive(work, PROG)
    return status if result is None else report(result, settings, PROG)
