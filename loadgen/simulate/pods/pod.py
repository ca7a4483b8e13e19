"""An emulated engine: the production scheduler and cache on a device that takes the time its profile gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backend.profiles import SimProfile
from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.contract.events import Keys, Tier
from engine.contract.load import LoadReport
from engine.contract.periods import BATCH_S, HEARTBEAT_S, LOAD_S
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.scheduler import SchedulerConfig, TokenOutput
from engine.tiers.stores.emulated_shared import EmulatedFolder
from engine.tiers.tiers import Tiers
from loadgen.simulate.pods.digests import SharedDigests, SharingCache
from loadgen.simulate.pods.noise import StepNoise
from loadgen.simulate.pods.runs import RunScheduler
from loadgen.simulate.pods.tiers import TierSpec, pod_tiers
from loadgen.simulate.pods.timeline import Timeline

MAX_RUN_STEPS = 100_000
_IDS = 0x3FFFFFFF


@dataclass(frozen=True, slots=True)
class PodSpec:
    """An emulated pod."""

    name: str
    profile: SimProfile
    speed: float = 1.0
    """A step takes the profile's time / speed."""
    block_size: int = 16
    kv_tokens: int = 0
    """Tokens whose KV the pool holds; 0: the profile's value."""
    max_step_tokens: int = 2048
    max_running: int = 256
    max_waiting: int = 100_000
    reuses: bool = True
    """False: prefixes are not cached."""
    eviction: Eviction = Eviction.LRU
    pin_share: float = 0.0
    """Share of the pool that requests may pin."""
    keep_share: float = 0.0
    """Share of the pool that may be kept while a tool runs, although no client asked for that."""
    noise: StepNoise | None = None
    """None: steps take exactly the profile's time."""
    tiers: TierSpec | None = None
    """None: blocks evicted from the pool are lost."""


@dataclass(frozen=True, slots=True)
class Report:
    """A pod's message to the registry: the net change of the keys it holds, and its load."""

    removed: Keys
    stored: Keys
    """Keys that are now in the pool and were not before."""
    load: LoadReport
    below: tuple[Keys, Keys] = ((), ())
    """Keys stored in host memory, and keys stored on disk."""


class SimPod:
    """One epoch of an engine. `on_output` gets first tokens and ends of answers, `on_report` gets published reports.

    Pods of one fleet share `digests`, and also `folder` if they have a shared tier.
    """

    def __init__(
        self,
        spec: PodSpec,
        timeline: Timeline,
        on_output: Callable[[TokenOutput], None],
        on_report: Callable[[str, Report], None],
        digests: SharedDigests | None = None,
        folder: EmulatedFolder | None = None,
    ) -> None:
        self.spec = spec
        self.speed = self._next_speed = spec.speed
        self.alive = True
        blocks = (spec.kv_tokens or spec.profile.kv_tokens) // spec.block_size
        self.cache = (
            SharingCache(
                blocks,
                spec.block_size,
                digests or SharedDigests(),
                eviction=spec.eviction,
                pinned_blocks=int(spec.pin_share * blocks),
                learnt_blocks=int(spec.keep_share * blocks),
            )
            if spec.reuses
            else PrefixCache(blocks, spec.block_size, index=IndexKind.OFF)
        )
        config = SchedulerConfig(spec.max_step_tokens, spec.max_running, spec.max_waiting)
        self.tiers: Tiers | None = None
        if spec.tiers is not None:
            self.tiers = pod_tiers(
                spec.tiers,
                self.cache,
                spec.profile,
                timeline,
                folder,
                step_tokens=spec.max_step_tokens,
                on_end=self._copied,
            )
        self.scheduler = RunScheduler(self.cache, config, self.tiers)
        self._timeline = timeline
        self._on_output = on_output
        self._on_report = on_report
        self._plan: StepPlan | None = None
        self._began_s = self._step_s = 0.0
        """When the current run began, and how long its first step takes at full speed."""
        self._steps = 0
        """Number of steps after which the current run ends."""
        self._turn = 0
        """Grows when a step's end is moved, which makes the earlier timer void."""
        self._started: set[int] = set()
        self._is_waking = False
        self._again_s = math.inf
        self._tell_at_s = math.inf
        self._begun = 0
        """Number of steps and runs that have begun; only noise needs it."""

    def submit(self, request: Request) -> None:
        """Queue the request. Raises QueueFull, and ValueError for a request that can never run."""
        self.scheduler.add(request)
        if self._plan is not None:
            if self.scheduler.run_steps > 1:
                self._cut_run()
        elif not self._is_waking:
            # As in the engine, all requests that arrive at the same moment are in the first step.
            self._is_waking = True
            self._timeline.after(0, self._begin)
        self._tell_soon()

    def abort(self, request_id: int) -> None:
        """Drop the request, if it has not ended."""
        self._started.discard(request_id)
        self.scheduler.abort(request_id)

    def die(self) -> None:
        """Stop the pod: it sends nothing from now on."""
        self.alive = False
        self._turn += 1

    def slow_to(self, speed: float) -> None:
        """Let steps take the profile's time / `speed`, from the next step on."""
        self._next_speed = speed
        if self._plan is not None and self.scheduler.run_steps > 1:
            self._cut_run()

    def step_end_s(self) -> float:
        """Return when the current step ends (in a run, the single step that is in progress); for an idle pod, now."""
        if self._plan is None:
            return self._timeline.now_s
        steps = self._steps
        if self.scheduler.run_steps > 1:
            steps = min(steps, self._steps_begun())
        return self._end_s(steps)

    def in_step(self) -> list[tuple[int, int]]:
        """Return for each prefill chunk in the current step its tokens and the position at its end."""
        chunks = () if self._plan is None else self._plan.chunks
        return [(len(chunk.tokens), chunk.start + len(chunk.tokens)) for chunk in chunks if not chunk.decodes]

    def _begin(self) -> None:
        self._is_waking = False
        if not self.alive:
            return
        self.speed = self._next_speed
        self.scheduler.advance(self._timeline.now_s)
        plan = self._plan = self.scheduler.schedule_run(MAX_RUN_STEPS)
        if plan is None:
            if self.tiers is not None:
                self._look_again(self.tiers)
            return
        self._began_s = self._timeline.now_s
        self._step_s = self.spec.profile.step_s(plan)
        if self.spec.noise is not None:
            self._step_s *= self.spec.noise.factor(self.spec.name, self._begun, self._began_s)
            self._begun += 1
        self._steps = self.scheduler.run_steps
        self._end_at(self._end_s(self._steps))

    def _copied(self) -> None:
        """Continue after a copy has ended, or after the content of a shared tier is known."""
        if self._plan is not None:
            assert self.tiers is not None
            self.tiers.poll()  # further copies begin now, as in the engine
        elif not self._is_waking:
            self._is_waking = True
            self._timeline.after(0, self._begin)

    def _look_again(self, tiers: Tiers) -> None:
        """Check again later, so that a request that waits for a copy gives up in time."""
        again_s = self._timeline.now_s + tiers.check_in_s()
        if again_s < math.inf and again_s != self._again_s:
            self._again_s = again_s
            self._timeline.at(again_s, self._copied)

    def _cut_run(self) -> None:
        steps = self._steps_begun()
        if steps < self._steps:
            self._steps = steps
            self._end_at(self._end_s(steps))

    def _steps_begun(self) -> int:
        assert self._plan is not None
        elapsed_s = (self._timeline.now_s - self._began_s) * self.speed
        return self.spec.profile.steps_by(self._step_s, len(self._plan.chunks), elapsed_s)

    def _end_s(self, steps: int) -> float:
        assert self._plan is not None
        run_s = self._step_s
        if steps > 1:
            run_s = self.spec.profile.run_s(run_s, len(self._plan.chunks), steps)
        return self._began_s + run_s / self.speed

    def _end_at(self, when_s: float) -> None:
        self._turn += 1
        turn = self._turn
        self._timeline.at(when_s, lambda: self._end() if turn == self._turn else None)

    def _end(self) -> None:
        plan, now_s = self._plan, self._timeline.now_s
        assert plan is not None
        elapsed_s = now_s - self._began_s
        if self.scheduler.run_steps > 1:
            outputs = self.scheduler.complete_run(_run_tokens(plan, self._steps), elapsed_s)
        else:
            sampled = {c.request.id: SampledToken(_token(c.request)) for c in plan.chunks if c.samples}
            outputs = self.scheduler.complete(StepResult(sampled, elapsed_s))
        started = self._started
        for output in outputs:
            if output.finish:
                started.discard(output.request_id)
                self._on_output(output)
            elif output.request_id not in started:
                started.add(output.request_id)
                self._on_output(output)
        self._tell_soon()
        self._begin()

    def _tell_soon(self) -> None:
        """Publish the changes at the next due time."""
        self._tell_at(self._timeline.now_s + (BATCH_S if self.cache.has_changes else LOAD_S))

    def _tell_at(self, when_s: float) -> None:
        if when_s < self._tell_at_s:
            self._tell_at_s = when_s
            self._timeline.at(when_s, lambda: self._tell(when_s))

    def _tell(self, due_s: float) -> None:
        if not self.alive or due_s != self._tell_at_s:
            return
        self._tell_at_s = math.inf
        changes, load = self.scheduler.take_changes(), self.scheduler.load()
        stored, host, disk = (tuple([key for key, at in changes.stored if at is tier]) for tier in Tier)
        self._on_report(self.spec.name, Report(tuple(changes.removed), stored, load, (host, disk)))
        if self.scheduler.has_work:
            self._tell_at(due_s + HEARTBEAT_S)


def _token(request: Request) -> int:
    """Return the next made-up token of the answer, a function of the request's number and the position."""
    return (request.id * 2654435761 + len(request.output_tokens)) & _IDS


def _run_tokens(plan: StepPlan, steps: int) -> dict[int, Sequence[int]]:
    """Return the next `steps` tokens of each request."""
    tokens: dict[int, Sequence[int]] = {}
    for chunk in plan.chunks:
        first = _token(chunk.request)
        fits = first + steps <= _IDS + 1
        tokens[chunk.request.id] = range(first, first + steps) if fits else [(first + i) & _IDS for i in range(steps)]
    return tokens
