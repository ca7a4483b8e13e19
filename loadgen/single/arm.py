"""One server under load: opened once, loaded one or more times, measured each time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from loadgen.experiment.arms import ArmSpec
from loadgen.experiment.checks import check_arm, warm_up
from loadgen.experiment.isolation import Deployment, look_up
from loadgen.load.arrivals import ArrivalKind
from loadgen.load.calibrate import measure_tokens_per_word
from loadgen.load.client import Client
from loadgen.load.player import ArmRun, RunSpec, play
from loadgen.load.progress import Progress
from loadgen.load.target import ServerUnusable, Target
from loadgen.load.workers import play_parallel
from loadgen.measure.pods import Counted, PodMetrics, counted
from loadgen.measure.summary import summarise
from loadgen.result.model import Summary
from loadgen.workloads.base import Session, Workload
from loadgen.workloads.render import Renderer

_SESSIONS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Settings that are the same for each load on a server."""

    seed: int
    workers: int = 1
    warmups: int = 0
    settle_s: float = 0.0
    tokens_per_word: float = 0.0
    """0: the value is measured."""
    objectives_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One load, and what the pods counted during it."""

    run: ArmRun
    counted: Counted | None


class OpenArm:
    """A server that can be measured. Use as an async context manager; entering raises ServerUnusable."""

    def __init__(self, spec: ArmSpec, target: Target, load: LoadSpec, progress: Progress) -> None:
        self.spec = spec
        self.model = ""
        self.tokens_per_word = load.tokens_per_word
        self.pods: set[str] = set()
        """Every pod that answered or that a gateway listed."""
        self.notes: list[str] = []
        """Warnings for the user, such as pods that could not be read."""
        self._target = target
        self._load = load
        self._progress = progress
        self._stack = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(Client(self._target))
            self.deployment: Deployment = await look_up(self._client, self.spec.metrics_urls)
            self._metrics = await stack.enter_async_context(PodMetrics(self.deployment.pods, self._target.tls()))
            await self._prepare()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def play(self, workload: Workload, spec: RunSpec, planned: int | None, title: str = "") -> Played:
        """Warm up, rest, load; show progress under `title`, or the arm's name. Raises ServerUnusable and WorkerDied."""
        name = self.spec.name
        warmed = await warm_up(self._client, f"{self._load.seed}/{name}/{self._count}", self._load.warmups)
        self._count += 1
        await asyncio.sleep(self._load.settle_s)
        before = await self._metrics.read() if self.deployment.pods else None
        self._progress.arm_started(title or name, planned)
        try:
            run = await self._play(workload, replace(spec, keeps_partial=True))
        finally:
            self._progress.arm_ended()
        self.pods |= warmed | {pod for pod in run.records.pods if pod}
        found = counted(before, await self._metrics.read()) if before else None
        self.notes += [f"{name}: {problem}" for problem in (found.problems if found else ())]
        return Played(run, found)

    def announce(self) -> None:
        """Print what is known about the server."""
        pods = f", {len(self.pods)} pods" if self.pods else ""
        self._progress.note(f"{self.spec.url}: model {self.model}{pods}, {self.tokens_per_word:g} tokens per word.")

    def summary(self, played: Played, percentiles: Sequence[float] = (), *, in_brief: bool = False) -> Summary:
        """Return the numbers of one load."""
        pods, objectives_ms = sorted(self.pods), self._load.objectives_ms
        return summarise(played.run, pods, objectives_ms, played.counted, percentiles=percentiles, in_brief=in_brief)

    async def _prepare(self) -> None:
        self.model = await self._client.model_id()
        self._client.target = self._target = replace(self._target, model=self.model)
        if not self.spec.metrics_urls:
            self.pods |= {pod.name for pod in self.deployment.pods}
        has_usage = await check_arm(self.spec, self._client, self._load.seed)
        if not self.tokens_per_word:
            if not has_usage:
                raise ServerUnusable(
                    f"{self.spec.url}: the answers carry no usage, so the size of a word cannot be measured:"
                    " give --tokens-per-word (about 1.4 for English)"
                )
            self.tokens_per_word = await measure_tokens_per_word(self._client, self._load.seed)

    async def _play(self, workload: Workload, spec: RunSpec) -> ArmRun:
        if self._load.workers > 1:
            words, workers = self.tokens_per_word, self._load.workers
            return await play_parallel(self._target, workload, words, spec, workers, self._progress.progress)
        renderer = Renderer(self.tokens_per_word, spec.salt)
        return await play(self._client, workload, renderer, spec, self._progress.request_ended)


@dataclass(frozen=True, slots=True)
class Untimed:
    """A workload without its own times: the arrival process decides."""

    base: Workload

    @property
    def name(self) -> str:
        """Return the workload's name."""
        return self.base.name

    @property
    def length(self) -> int | None:
        """Return the workload's number of sessions."""
        return self.base.length

    def session(self, number: int) -> Session:
        """Return the workload's session without its start time."""
        return replace(self.base.session(number), start_s=None)

    def about(self) -> Mapping[str, str]:
        """Return the workload's facts, with the fact that its times are not used."""
        return {**self.base.about(), "times": "not those of the file"}


def timed_by(workload: Workload, kind: ArrivalKind) -> Workload:
    """Return the workload, without its own times unless the arrivals follow them."""
    has_times = workload.length != 0 and workload.session(0).start_s is not None
    return Untimed(workload) if has_times and kind is not ArrivalKind.TRACE else workload


def cut_short(run: ArmRun) -> tuple[str, ...]:
    """Return a line for the user if a run was ended early."""
    if not run.is_partial:
        return ()
    return (
        f"PARTIAL: stopped after {run.duration_s:.0f} s. {len(run.records):,} of {run.planned:,} requests had ended; "
        "the figures are of these.",
    )


def fewer_than_asked(planned: int, asked: int, flag: str) -> tuple[str, ...]:
    """Return a line for the user if a data set has fewer requests than a flag asks for."""
    if planned >= asked:
        return ()
    return (f"The data set has {planned:,} of the {asked:,} requests that {flag} asks for; none was sent twice.",)


async def sessions_of_step(workload: Workload, prompts: int) -> tuple[int, int]:
    """Return the same as `sessions_of` inside an event loop: millions of sessions must not delay Ctrl-C."""
    sessions = requests = 0
    while requests < prompts:
        more, theirs = sessions_of(workload, min(prompts - requests, _SESSIONS_AT_ONCE), sessions)
        if not more:
            break
        sessions, requests = sessions + more, requests + theirs
        await asyncio.sleep(0)
    return sessions, requests


def sessions_of(workload: Workload, prompts: int, first: int = 0) -> tuple[int, int]:
    """Return how many sessions from `first` on it takes to have at least `prompts` requests in total (all sessions if
    they have fewer), and the number of requests in these sessions."""
    sessions = requests = 0
    while requests < prompts and (workload.length is None or first + sessions < workload.length):
        requests += len(workload.session(first + sessions).turns)
        sessions += 1
    return sessions, requests
