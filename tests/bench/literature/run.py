"""Plays the cases and reduces each run to the numbers of the tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from loadgen.measure.summary import summarise
from loadgen.simulate.scenario import Scenario, SimulatedRun, play
from tests.bench.literature.cases import (
    KINDS,
    LOAD,
    NO_CACHE,
    SHAPE_ARMS,
    SHARING_LEVELS,
    WORKLOAD_ARMS,
    Kind,
    by_workload,
    closed,
    shape,
    sharing,
    unthinking,
    without_caching,
)

PAYS = 0.02
"""A smaller gain in throughput does not count."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Latencies count from the intended time; the study fails if a request does not complete."""

    hit_rate: float
    """Cached / prompt tokens."""
    request_imbalance: float
    """Largest / mean over the pods of their number of requests."""
    load_imbalance: float
    """Largest / mean over the pods of mean requests in flight."""
    mean_ttft_ms: float
    p99_ttft_ms: float
    throughput: float
    """Requests per second."""
    prefix_pods: int
    """Pods that served at least 2 % of the requests of the largest group."""


@dataclass(frozen=True, slots=True)
class Row:
    """An arm of a case, with a run for each seed."""

    case: str
    arm: str
    runs: tuple[Measured, ...]

    def mean(self, name: str) -> float:
        """Return the mean over the seeds."""
        return statistics.fmean(getattr(run, name) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Tables:
    """All measurements."""

    seeds: tuple[int, ...]
    shape: tuple[Row, ...]
    workloads: tuple[Row, ...]
    rates: dict[str, float]
    """Workload -> offered sessions per second."""
    sharing: tuple[Row, ...]
    """`case` is the level, 0 to 1."""


Tell = Callable[[str], None]


def study(seeds: Sequence[int], requests: int, tell: Tell) -> Tables:
    """Play everything, with `requests` sessions per run."""
    tell("80 % of requests share one system prompt")
    first = tuple(_row("", arm, [shape(seed, 2 * requests) for seed in seeds]) for arm in SHAPE_ARMS)
    rates: dict[str, float] = {}
    second: list[Row] = []
    for kind in KINDS:
        tell(kind.name)
        rate = rates[kind.name] = LOAD * capacity(kind, seeds[0], requests // 2)
        runs = [by_workload(kind, seed, requests, rate) for seed in seeds]
        second += [_row(kind.name, arm, runs) for arm in WORKLOAD_ARMS]
    third: list[Row] = []
    for level in SHARING_LEVELS:
        tell(f"{level:.0%} of a prompt shared")
        third += [_row(f"{level:g}", arm, [sharing(level, seed, requests) for seed in seeds]) for arm in WORKLOAD_ARMS]
    return Tables(tuple(seeds), first, tuple(second), rates, tuple(third))


def capacity(kind: Kind, seed: int, sessions: int) -> float:
    """Return how many sessions per second the fleet completes without caching, if users without pauses keep it busy."""
    scenario = without_caching(by_workload(kind, seed, sessions, 1.0))
    busy = replace(scenario, workload=unthinking(scenario.workload), arrivals=closed())
    run = play(busy, "least_loaded")
    return measured(run).throughput * sessions / len(run.records)


def measured(run: SimulatedRun) -> Measured:
    """Return a run's numbers. Raises RuntimeError if a request failed, which should not happen here."""
    summary = summarise(run, in_brief=True)
    if summary.failed or not summary.completed:
        raise RuntimeError(f"{summary.failed} of {summary.planned} requests failed: {summary.failures}")
    assert summary.ttft.mean_ms is not None
    assert summary.ttft.p99_ms is not None
    return Measured(
        hit_rate=summary.reuse.cached_token_rate or 0.0,
        request_imbalance=summary.request_imbalance or 1.0,
        load_imbalance=summary.imbalance or 1.0,
        mean_ttft_ms=summary.ttft.mean_ms,
        p99_ttft_ms=summary.ttft.p99_ms,
        throughput=summary.request_throughput,
        prefix_pods=_prefix_pods(run),
    )


def pays_from(tables: Tables, arm: str, base: str) -> float | None:
    """Return the lowest sharing level above which `arm` always has at least 2 % more throughput than `base`,
    interpolated between two measured levels; None: there is no such level.
    """
    gains = dict(gains_of(tables, arm, base))
    levels = sorted(gains)
    paying = [level for level in levels if all(gains[higher] >= PAYS for higher in levels if higher >= level)]
    if not paying:
        return None
    first = paying[0]
    below = next((low for low, high in pairwise(levels) if high == first), None)
    if below is None:
        return first
    return below + (first - below) * (PAYS - gains[below]) / (gains[first] - gains[below])


def gains_of(tables: Tables, arm: str, base: str) -> Iterator[tuple[float, float]]:
    """Yield (level, throughput of `arm` / that of `base` - 1)."""
    by_name = {(row.case, row.arm): row.mean("throughput") for row in tables.sharing}
    for level in SHARING_LEVELS:
        yield level, by_name[f"{level:g}", arm] / by_name[f"{level:g}", base] - 1


def _row(case: str, arm: str, scenarios: Sequence[Scenario]) -> Row:
    return Row(case, arm, tuple(measured(_played(scenario, arm)) for scenario in scenarios))


def _played(scenario: Scenario, arm: str) -> SimulatedRun:
    """Play the scenario. Without caching, routing matters only for load, so the least loaded pod gets each request."""
    if arm == NO_CACHE:
        return play(without_caching(scenario), "least_loaded")
    return play(scenario, arm)


def _prefix_pods(run: SimulatedRun) -> int:
    records = run.records
    named = [code for code in records.group.tolist() if code]
    if not named:
        return 0
    largest = Counter(named).most_common(1)[0][0]
    per_pod = Counter(records.pod[records.group == largest].tolist())
    return sum(count >= 0.02 * per_pod.total() for count in per_pod.values())
