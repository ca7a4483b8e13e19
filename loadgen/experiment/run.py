"""Runs the blocks of an experiment, round after round."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from loadgen.experiment.arms import ArmSpec, block_order
from loadgen.experiment.checks import check_arm, check_models, warm_up
from loadgen.experiment.compared import compared
from loadgen.experiment.contrasts import Contraster, relative_half_width
from loadgen.experiment.isolation import Deployment, Isolation, isolate, look_up
from loadgen.experiment.pairs import pair
from loadgen.experiment.plan import Block, Plan, Round
from loadgen.experiment.stopping import counted_rounds
from loadgen.load.calibrate import measure_tokens_per_word
from loadgen.load.client import Client
from loadgen.load.player import ArmRun, RunSpec, play
from loadgen.load.progress import Progress
from loadgen.load.target import ServerUnusable
from loadgen.load.workers import play_parallel
from loadgen.measure.pods import PodMetrics, counted
from loadgen.workloads.render import Renderer

MOST_COUNTED = 10_000
"""Maximum number of sessions whose turns are counted for the progress display."""


@dataclass(slots=True)
class _Arm:
    spec: ArmSpec
    client: Client
    deployment: Deployment
    metrics: PodMetrics


class Experiment:
    """One run of a plan. What has been measured can be read at any time, even after `run` was cancelled."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan = plan
        self.rounds: list[dict[str, Block]] = []
        """Whole rounds; each maps arm names to blocks."""
        self.begun: dict[str, Block] = {}
        """Blocks of the round that has begun and is not whole; a cancellation may have cut the last one short."""
        self.order: list[str] = []
        """Names of the arms in the order in which their blocks ran, for whole rounds."""
        self.pods: dict[str, set[str]] = {arm.url: set() for arm in plan.arms}
        """For each address, every pod that answered there or that the gateway listed."""
        self.model = ""
        self.tokens_per_word = plan.tokens_per_word
        self.isolation: Isolation | None = None
        self.stopped = "interrupted"
        """Why no more rounds run."""
        self.is_partial = True
        """Whether the run ended before its last round."""
        self.problems: list[str] = []
        """Reasons why pods' counters could not be read, each once."""
        self._progress = progress

    async def run(self) -> None:
        """Run all rounds; stop early if no arm answers any more. Raises ServerUnusable if an arm cannot be measured."""
        clock = asyncio.get_running_loop().time
        async with AsyncExitStack() as stack:
            arms = [await self._open(stack, spec) for spec in self.plan.arms]
            await self._prepare(arms)
            start_s, reason = clock(), None
            while reason is None:
                await self._run_round(arms)
                reason = self._reason_to_stop(clock() - start_s)
        self.stopped, self.is_partial = reason, False
        self._progress.note(f"Stopped after {counted_rounds(len(self.rounds))}: {reason}.")

    @property
    def kept(self) -> list[dict[str, Block]]:
        """Return the whole rounds; if there is none, the blocks of the first round that have been played."""
        return self.rounds or ([self.begun] if self.begun else [])

    def half_width(self) -> float:
        """Return the widest interval's half width relative to the ratio of mean TTFT; infinite if one is missing."""
        pairs = pair([{name: block.run for name, block in blocks.items()} for blocks in self.rounds])
        others = [arm.name for arm in self.plan.arms if arm.name != self.plan.baseline]
        if pairs is None or not others:
            return float("inf") if others else 0.0
        contraster = Contraster(pairs, len(self.plan.arms), self.plan.seed)
        found = contraster.contrasts(compared(False)[0], self.plan.baseline, others)
        return max(relative_half_width(found.get(arm)) for arm in others)

    # -- before the first block ----------------------------------------------------------------------------------

    async def _open(self, stack: AsyncExitStack, spec: ArmSpec) -> _Arm:
        client = await stack.enter_async_context(Client(self.plan.target(spec)))
        deployment = await look_up(client, spec.metrics_urls)
        metrics = await stack.enter_async_context(PodMetrics(deployment.pods, client.target.tls()))
        return _Arm(spec, client, deployment, metrics)

    async def _prepare(self, arms: list[_Arm]) -> None:
        plan = self.plan
        self.model = check_models(plan.arms, [await arm.client.model_id() for arm in arms])
        has_usage = [await check_arm(arm.spec, arm.client, plan.seed) for arm in arms]
        if not all(has_usage) and not plan.tokens_per_word:
            silent = ", ".join(arm.spec.name for arm, known in zip(arms, has_usage, strict=True) if not known)
            raise ServerUnusable(
                f"{silent}: the answers carry no usage, so neither the size of a word nor a hit rate can be known;"
                " compare without a hit rate by giving --tokens-per-word (about 1.4 for English)"
            )
        if not self.tokens_per_word:
            self.tokens_per_word = await measure_tokens_per_word(arms[0].client, plan.seed)
        self.isolation = await isolate([arm.deployment for arm in arms], plan.seed)
        for arm in arms:
            if not arm.spec.metrics_urls:
                self.pods[arm.spec.url] |= {pod.name for pod in arm.deployment.pods}
        self._progress.note(f"Model {self.model}, {self.tokens_per_word:g} tokens per word. {self.isolation.about}")

    # -- rounds --------------------------------------------------------------------------------------------------

    async def _run_round(self, arms: list[_Arm]) -> None:
        number = len(self.rounds)
        what = self.plan.round(number)
        planned = _planned(what, self.plan.sessions)
        order = [arm.name for arm in block_order(self.plan.arms, number)]
        self._progress.note(f"Round {number + 1}: {', '.join(order)}")
        by_name = {arm.spec.name: arm for arm in arms}
        self.begun = {}
        for name in order:
            self.begun[name] = block = await self._run_block(by_name[name], number, what, planned)
            if block.run.is_partial:
                raise asyncio.CancelledError
        self.rounds.append({arm.name: self.begun[arm.name] for arm in self.plan.arms})
        self.order += order

    async def _run_block(self, arm: _Arm, number: int, what: Round, planned: int | None) -> Block:
        assert self.isolation is not None
        plan, name = self.plan, arm.spec.name
        self.pods[arm.spec.url] |= await warm_up(arm.client, f"{plan.seed}/{name}/{number}", plan.warmup_requests)
        salt = await self.isolation.begin(arm.deployment, name, number)
        await asyncio.sleep(plan.settle_s)
        spec = RunSpec(
            arrivals=plan.arrivals,
            seed=plan.seed + number,
            time_limit_s=plan.time_limit_s,
            sessions=plan.sessions,
            first_session=what.first_session,
            salt=salt,
            max_in_flight=plan.max_in_flight,
            keeps_partial=True,
        )
        before = await arm.metrics.read() if arm.deployment.pods else None
        self._progress.arm_started(name, planned)
        run = await self._play(arm, what, spec)
        self._progress.arm_ended()
        self.pods[arm.spec.url] |= {pod for pod in run.records.pods if pod}
        if before is None:
            return Block(name, run, None)
        found = counted(before, await arm.metrics.read())
        self.problems += [problem for problem in found.problems if problem not in self.problems]
        return Block(name, run, found)

    async def _play(self, arm: _Arm, what: Round, spec: RunSpec) -> ArmRun:
        if self.plan.workers > 1:
            return await play_parallel(
                arm.client.target, what.workload, self.tokens_per_word, spec, self.plan.workers, self._progress.progress
            )
        renderer = Renderer(self.tokens_per_word, spec.salt)
        return await play(arm.client, what.workload, renderer, spec, self._progress.request_ended)

    def _reason_to_stop(self, elapsed_s: float) -> str | None:
        if not any(block.run.records.completed.any() for block in self.rounds[-1].values()):
            return "no request of the last round completed in any arm"
        if len(self.plan.arms) == 1 and self.plan.stopping.rounds is None:
            return "one arm alone: nothing to compare"
        rounds = len(self.rounds)
        half_width = self.half_width() if rounds % 2 == 0 else float("inf")
        if rounds % 2 == 0:
            known = f"is known within {half_width:.0%}" if half_width < 1 else "is not known yet"
            self._progress.note(f"After {rounds} rounds the ratio of mean TTFT {known}.")
        return self.plan.stopping.reason(rounds, elapsed_s, half_width)


def _planned(what: Round, sessions: int | None) -> int | None:
    """Return the number of requests in a block; None if it is unknown, or if there are too many to count."""
    length = what.workload.length
    rest = None if length is None else max(0, length - what.first_session)
    count = min((n for n in (sessions, rest) if n is not None), default=None)
    if count is None or count > MOST_COUNTED:
        return None
    return sum(len(what.workload.session(what.first_session + i).turns) for i in range(count))
