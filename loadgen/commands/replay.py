"""`warmroute-loadgen replay FILE`: load with the times, lengths and sharing that a trace recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from engine.common.settings import ConfigError, group, load_or_exit
from loadgen.commands.argv import joined
from loadgen.commands.finish import check_writable, drive, report
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.commands.server_settings import LISTS, OneArmSettings
from loadgen.commands.trace_format import FORMATS, format_of, window
from loadgen.load.arrivals import ArrivalKind, ArrivalSettings, ArrivalSpec
from loadgen.load.player import RunSpec
from loadgen.load.progress import Progress
from loadgen.output.settings import OutputSettings
from loadgen.result.model import Result
from loadgen.single.arm import OpenArm, fewer_than_asked, timed_by
from loadgen.single.result import one_result
from loadgen.workloads.base import Workload
from loadgen.workloads.catalog import WorkloadSettings, build_workload

PROG = "warmroute-loadgen replay"


@group("Trace", common=("dataset_path", "fixed_schedule", "num_prompts", "speedup", "start_offset_s", "end_offset_s"))
class ReplaySettings(OutputSettings, WorkloadSettings, ArrivalSettings, OneArmSettings):
    """A request trace against one server.

    Exit status: 0, 1 if the server cannot be measured or a file cannot be written, 2 for bad flags, 3 if the run is
    invalid, 130 on Ctrl-C.
    """

    removed = REMOVED
    removed_in = REMOVED_IN

    dataset_path: CliPositionalArg[str] = Field(
        description="trace file, plain or gzipped: Mooncake or Bailian JSON lines, BurstGPT or Azure CSV"
    )
    workload: str = Field(
        "", description=f"format of the trace: {', '.join(FORMATS)}; empty: recognised by its first line"
    )
    fixed_schedule: bool = Field(
        True,
        description="send at the trace's times; off: at --request-rate, --arrival closed, ..., in the trace's order",
    )
    start_offset_s: float = Field(0.0, ge=0, description="skip requests before this time of the trace, seconds")
    end_offset_s: float | None = Field(
        None, gt=0, description="skip requests from this time of the trace on, seconds; none: skip none"
    )
    num_prompts: int | None = Field(None, ge=1, description="requests at most; none: all of them")
    out: str = Field("out/replay", description="folder for result.json, report.html, report.md, result.csv and PNGs")

    @model_validator(mode="before")
    @classmethod
    def _take_trace(cls, values: dict[str, Any]) -> dict[str, Any]:
        trace = values.get("dataset_path")
        if not isinstance(trace, str):
            return values  # the field's own check reports the error
        return {**values, "workload": values.get("workload") or format_of(Path(trace))}

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.workload not in FORMATS:
            raise ValueError(f"--workload {self.workload} is not a trace; formats are {', '.join(FORMATS)}")
        if self.end_offset_s is not None and self.end_offset_s <= self.start_offset_s:
            raise ValueError(
                f"--end-offset-s {self.end_offset_s:g} must be above --start-offset-s {self.start_offset_s:g}"
            )
        given = sorted(set(ArrivalSettings.model_fields) & self.model_fields_set)
        if self.fixed_schedule and given:
            raise ValueError(
                f"--{given[0].replace('_', '-')} needs --no-fixed-schedule: the trace has times of its own"
            )
        if not self.fixed_schedule and self.speedup is not None:
            raise ValueError("--speedup needs --fixed-schedule: without it the trace's times are not used")
        return self


def plan(settings: ReplaySettings) -> tuple[Workload, RunSpec, int]:
    """Return the workload, how it is played, and its number of requests. Raises ConfigError."""
    workload = build_workload(settings)
    speedup = settings.speedup or 1.0
    end_s = None if settings.end_offset_s is None else settings.end_offset_s / speedup
    first, count = window(workload, settings.start_offset_s / speedup, end_s)
    if not count:
        raise ConfigError(f"{settings.dataset_path} has no request between --start-offset-s and --end-offset-s")
    count = min(count, settings.num_prompts or count)
    arrivals = ArrivalSpec(ArrivalKind.TRACE) if settings.fixed_schedule else settings.arrivals()
    spec = RunSpec(
        arrivals=arrivals,
        seed=settings.seed,
        time_limit_s=settings.time_limit_s,
        first_session=first,
        sessions=count,
        max_in_flight=settings.max_concurrency,
    )
    return timed_by(workload, arrivals.kind), spec, count


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(ReplaySettings, joined(argv, LISTS), PROG)
    try:
        workload, spec, planned = plan(settings)
        check_writable(settings.out, "--out")
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2

    async def work(progress: Progress) -> Result:
        arm = settings.arm(settings.policy or "server", settings.policy)
        async with OpenArm(arm, settings.target(arm), settings.load_spec(settings.seed), progress) as opened:
            shown = settings.configuration()
            opened.notes += fewer_than_asked(planned, settings.num_prompts or planned, "--num-prompts")
            result, _ = await one_result("replay", opened, workload, spec, planned, shown, flush=settings.flush_cache)
            return result

    result, status = drive(work, PROG)
    return status if result is None else report(result, settings, PROG)
