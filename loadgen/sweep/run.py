"""Plays the steps of a sweep: the arms' next steps in turn, with empty caches before each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from loadgen.experiment.arms import ArmSpec
from loadgen.experiment.checks import check_models
from loadgen.experiment.isolation import Isolation, isolate
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, mean_turns
from loadgen.load.player import RunSpec
from loadgen.load.progress import Progress
from loadgen.load.target import Target
from loadgen.result.model import Summary, SweepPoint
from loadgen.single.arm import LoadSpec, OpenArm, fewer_than_asked, sessions_of_step
from loadgen.sweep.saturation import reason
from loadgen.sweep.search import Search
from loadgen.workloads.base import Workload


@dataclass(frozen=True, slots=True)
class Steps:
    """The quantity that is swept: rates of gamma arrivals, or concurrent sessions of the closed loop."""

    kind: ArrivalKind
    start: float
    listed: Sequence[float] = ()
    most: float = math.inf
    burstiness: float = 1.0

    @property
    def over_concurrency(self) -> bool:
        """Return whether a step is a number of concurrent sessions."""
        return self.kind is ArrivalKind.CLOSED

    def arrivals(self, step: float, turns_per_session: float) -> ArrivalSpec:
        """Return the arrivals of one step."""
        if self.over_concurrency:
            return ArrivalSpec(self.kind, concurrency=round(step))
        return ArrivalSpec(self.kind, rate=step / turns_per_session, burstiness=self.burstiness)

    def words(self, step: float) -> str:
        """Return the step as text for a reader."""
        return f"{step:g} session{'s' * (step != 1)} at a time" if self.over_concurrency else f"{step:g} requests/s"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Everything that decides a sweep."""

    arms: tuple[tuple[ArmSpec, Target], ...]
    load: LoadSpec
    workload: Workload
    steps: Steps
    precision: float
    prompts: int
    point_s: float
    max_time_s: float
    time_limit_s: float
    """Longest duration of one step."""
    max_in_flight: int | None = None


@dataclass(slots=True)
class Curve:
    """One arm's steps so far."""

    arm: OpenArm
    search: Search
    points: list[SweepPoint] = field(default_factory=list)
    reasons: dict[float, str] = field(default_factory=dict)
    """Why each saturated step is saturated."""


class Sweep:
    """One run of a plan."""

    def __init__(self, plan: SweepPlan, progress: Progress, clock: Callable[[], float]) -> None:
        self.plan = plan
        self.curves: list[Curve] = []
        self.model = ""
        self.isolation: Isolation | None = None
        self.is_cut_short = False
        """Whether --max-time ended the sweep."""
        self.is_interrupted = False
        """Whether the user ended the sweep early."""
        self.is_unconfirmed = False
        """Whether there was no time to repeat a saturated step."""
        self._progress = progress
        self._clock = clock
        self._turns = mean_turns(plan.workload, plan.prompts)
        self._count = 0
        self._end_s = math.inf

    async def run(self, stack: AsyncExitStack) -> None:
        """Run all steps of all arms, in turn. Raises ServerUnusable and WorkerDied."""
        plan, steps = self.plan, self.plan.steps
        for spec, target in plan.arms:
            arm = await stack.enter_async_context(OpenArm(spec, target, plan.load, self._progress))
            search = Search(steps.start, plan.precision, steps.listed, steps.over_concurrency, steps.most)
            self.curves.append(Curve(arm, search))
        arms = [curve.arm for curve in self.curves]
        self.model = check_models([arm.spec for arm in arms], [arm.model for arm in arms])
        self.isolation = await isolate([arm.deployment for arm in arms], plan.load.seed)
        self._progress.note(f"Model {self.model}. {self.isolation.about}")
        self._end_s = self._clock() + plan.max_time_s
        while pending := [(curve, step) for curve in self.curves if (step := curve.search.next()) is not None]:
            for curve, step in pending:
                if self._count and not self._fits(step):
                    self.is_cut_short = True
                    self._progress.note(f"{steps.words(step)} would end after --max-time {plan.max_time_s:g} s.")
                    return
                await self._point(curve, step)
                if self.is_interrupted:
                    return

    @property
    def has_points(self) -> bool:
        """Whether any step has been measured."""
        return any(curve.points for curve in self.curves)

    def _fits(self, step: float) -> bool:
        return self._clock() + self._expected_s(step) <= self._end_s

    def _expected_s(self, step: float) -> float:
        """Return the least duration of a step."""
        sessions = 0.0 if self.plan.steps.over_concurrency else self._prompts(step) / step
        return sessions + self.plan.load.settle_s

    def _prompts(self, step: float) -> int:
        """Return the requests of a step: as many as are due within `point_s`; over concurrency, ten times as many as
        its concurrent sessions hold."""
        plan = self.plan
        wanted = 10 * step * self._turns if plan.steps.over_concurrency else step * plan.point_s
        return max(plan.prompts, math.ceil(wanted))

    async def _point(self, curve: Curve, step: float) -> None:
        played, why = await self._play(curve, step)
        if self.is_interrupted and self.has_points:
            return  # the steps before it are whole, and it is not
        if self.is_interrupted:
            why = ""
        elif why and not self._fits(step):
            self.is_unconfirmed = True
        elif why:  # it counts only if a second run saturates, too
            again, still = await self._play(curve, step)
            if not still and not self.is_interrupted:
                played, why = again, ""
        if why:
            curve.reasons[step] = why
        curve.search.add(step, saturated=bool(why))
        rate, concurrency = (None, round(step)) if self.plan.steps.over_concurrency else (step, None)
        curve.points.append(
            SweepPoint(arm=curve.arm.spec.name, rate=rate, concurrency=concurrency, summary=played, saturated=bool(why))
        )

    async def _play(self, curve: Curve, step: float) -> tuple[Summary, str]:
        """Run a step once; return its summary and why it saturates (empty: it does not)."""
        plan, arm = self.plan, curve.arm
        sessions, planned = await sessions_of_step(plan.workload, self._prompts(step))
        assert self.isolation is not None
        salt = await self.isolation.begin(arm.deployment, arm.spec.name, self._count)
        self._count += 1
        spec = RunSpec(
            arrivals=plan.steps.arrivals(step, self._turns),
            seed=plan.load.seed,
            time_limit_s=plan.time_limit_s,
            sessions=sessions,
            salt=salt,
            max_in_flight=plan.max_in_flight,
        )
        played = await arm.play(plan.workload, spec, planned, f"{arm.spec.name}, {plan.steps.words(step)}")
        self.is_interrupted = played.run.is_partial
        arm.notes += [
            line for line in fewer_than_asked(planned, self._prompts(step), "a step") if line not in arm.notes
        ]
        summary = arm.summary(played)
        lower = sorted((p for p in curve.points if step_of(p) < step), key=step_of)
        at_a_time = step if plan.steps.over_concurrency else 0.0
        why = reason(summary, played.run.records, lower, at_a_time)
        if why:
            self._progress.note(
                f"{arm.spec.name}: {plan.steps.words(step)} {'is' if step == 1 else 'are'} too much: {why}"
            )
        return summary, why


def step_of(point: SweepPoint) -> float:
    """Return a point's rate or number of concurrent sessions."""
    return point.rate if point.rate is not None else float(point.concurrency or 0)
