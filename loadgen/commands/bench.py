"""`warmroute-loadgen bench`: one server, with the flags and the result file of `vllm bench serve`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from engine.common.settings import ConfigError, group, load_or_exit
from loadgen.commands.argv import joined
from loadgen.commands.finish import check_writable, drive, report
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.commands.server_settings import LISTS, OneArmSettings, words_of
from loadgen.commands.vllm_file import Naming, write_bench_file
from loadgen.load.arrivals import ArrivalSettings, check_times, mean_turns
from loadgen.load.player import RunSpec
from loadgen.load.progress import Progress
from loadgen.output.settings import OutputSettings
from loadgen.result.model import Result
from loadgen.single.arm import OpenArm, Played, fewer_than_asked, sessions_of, timed_by
from loadgen.single.result import one_result
from loadgen.workloads.base import Workload
from loadgen.workloads.catalog import WorkloadSettings, build_workload

PROG = "warmroute-loadgen bench"
Metric = Literal["ttft", "tpot", "itl", "e2el"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@group("Result file of vLLM", common=("num_prompts", "save_result", "result_filename", "percentile_metrics"))
class BenchSettings(OutputSettings, WorkloadSettings, ArrivalSettings, OneArmSettings):
    """One server, with the flags and the result file of `vllm bench serve`.

    Exit status: 0, 1 if the server cannot be measured or a file cannot be written, 2 for bad flags, 3 if the run is
    invalid, 130 on Ctrl-C.
    """

    removed = REMOVED
    removed_in = REMOVED_IN

    workload: str = Field("random", description=WorkloadSettings.model_fields["workload"].description)
    dataset_name: str | None = Field(
        None,
        description="vLLM's name for --workload: sharegpt, random, prefix_repetition, burstgpt, custom",
    )
    num_prompts: int = Field(
        1000, ge=1, le=100_000_000, description="requests; the session that reaches this number is played to its end"
    )
    request_rate: float | None = Field(math.inf, gt=0, description="requests per second; inf: all at once")
    percentile_metrics: list[Metric] = Field(
        list(METRICS),
        description=f"metrics in the console and in --save-result, comma-separated, any of {', '.join(METRICS)}",
    )
    metric_percentiles: list[float] = Field(
        [99.0], description="percentiles of these metrics, comma-separated, above 0, below 100"
    )
    save_result: bool = Field(False, description="write vLLM's result file")
    save_detailed: bool = Field(False, description="include lengths, latencies and errors of each request")
    append_result: bool = Field(False, description="add a line to the result file instead of replacing it")
    result_dir: str = Field(".", description="folder of the result file")
    result_filename: str = Field(
        "", description="name of the result file; empty: backend, rate, model and time, as in vLLM"
    )
    metadata: list[str] = Field([], description="KEY=VALUE for the result file; repeatable")
    label: str = Field("", description="name of the run in the result file; empty: the backend")
    disable_tqdm: bool = Field(False, description="show no progress")
    out: str = Field("", description="folder for result.json, report.html, report.md, result.csv and PNGs; empty: none")

    @model_validator(mode="before")
    @classmethod
    def _take_dataset_name(cls, values: dict[str, Any]) -> dict[str, Any]:
        if name := values.get("dataset_name"):
            if "workload" in values:
                raise ValueError("--dataset-name and --workload exclude each other: give one of them")
            return {**values, "workload": name}
        return values

    @field_validator("metric_percentiles")
    @classmethod
    def _check_percentiles(cls, percentiles: list[float]) -> list[float]:
        if not all(0 < p < 100 for p in percentiles):
            raise ValueError("must be above 0 and below 100")
        return percentiles

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        words_of(self.metadata, "--metadata")
        if not self.save_result:
            given = [
                n
                for n in ("save_detailed", "append_result", "result_dir", "result_filename", "metadata")
                if self._given(n)
            ]
            if given:
                raise ValueError(f"--{given[0].replace('_', '-')} needs --save-result")
        return self

    def _given(self, name: str) -> bool:
        return name in self.model_fields_set and bool(getattr(self, name))


def plan(settings: BenchSettings) -> tuple[Workload, RunSpec, int]:
    """Return the workload, how it is played, and its number of requests. Raises ConfigError."""
    workload = build_workload(settings)
    sessions, planned = sessions_of(workload, settings.num_prompts)
    try:
        arrivals = settings.arrivals(mean_turns(workload, sessions))
        check_times(arrivals, workload)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    spec = RunSpec(
        arrivals=arrivals,
        seed=settings.seed,
        time_limit_s=settings.time_limit_s,
        sessions=sessions,
        max_in_flight=settings.max_concurrency,
        keep_gaps=settings.save_detailed,
    )
    return timed_by(workload, arrivals.kind), spec, planned


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(BenchSettings, joined(argv, LISTS), PROG)
    try:
        workload, spec, planned = plan(settings)
        if settings.out:
            check_writable(settings.out, "--out")
        if settings.save_result:
            check_writable(settings.result_dir, "--result-dir")
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2

    async def work(progress: Progress) -> tuple[Result, Played]:
        arm = settings.arm(settings.policy or settings.label or "server", settings.policy)
        async with OpenArm(arm, settings.target(arm), settings.load_spec(settings.seed), progress) as opened:
            opened.notes += fewer_than_asked(planned, settings.num_prompts, "--num-prompts")
            result, played = await one_result(
                "bench",
                opened,
                workload,
                spec,
                planned,
                settings.configuration(),
                settings.metric_percentiles,
                flush=settings.flush_cache,
            )
            return result, played

    found, status = drive(work, PROG, is_quiet=settings.disable_tqdm)
    if found is None:
        return status
    result, played = found
    status = report(result, settings, PROG) if settings.out else report(result, None, PROG)
    if settings.save_result:
        status = _save(result, played, settings) or status
    return status


def _save(result: Result, played: Played, settings: BenchSettings) -> int:
    naming = Naming(
        Path(settings.result_dir),
        settings.result_filename,
        settings.label or settings.backend,
        settings.request_rate,
        settings.max_concurrency,
    )
    try:
        path = write_bench_file(
            result,
            played.run,
            naming,
            settings.percentile_metrics,
            dict(words_of(settings.metadata, "--metadata")),
            is_detailed=settings.save_detailed,
            is_appended=settings.append_result,
        )
    except OSError as error:
        print(f"{PROG}: --result-dir cannot be written: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0
