"""An emulated pod takes the time that the real engine loop takes on `--device sim`, step for step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.profiles import PROFILES
from engine.backend.sim import SimBackend
from engine.cache.prefix_cache import PrefixCache
from engine.contract.keys import PrefixKey
from engine.contract.periods import BATCH_S
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import EngineLoop
from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import KeySpan, Request
from engine.sched.scheduler import Scheduler, SchedulerConfig, TokenOutput
from loadgen.simulate.pods.pod import PodSpec, Report, SimPod
from loadgen.simulate.pods.timeline import Timeline

PROFILE = PROFILES["h100-8b"]
SPEC = PodSpec("pod", PROFILE, kv_tokens=8000, max_step_tokens=512, max_running=5)
Arrival = tuple[float, int, int, int]
"""Seconds, tokens of a shared prefix, unique tokens, tokens of the answer."""
Seen = dict[tuple[int, str], tuple[float, int]]
"""(request, 'first' or how it ended) -> (seconds, cached tokens)."""

TICK_S = 0.0011731
"""Arrivals at multiples of this never coincide with the end of a step: the order of the two would not be defined."""
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 900).map(TICK_S.__mul__), st.integers(0, 600), st.integers(1, 900), st.integers(1, 30)),
    min_size=1,
    max_size=8,
).map(sorted)


def request(number: int, arrival: Arrival) -> Request:
    _, shared, own, answer = arrival
    prompt = [7] * shared + [1000 + number] * own
    return Request(number, prompt, answer)


def emulated(spec: PodSpec, arrivals: Sequence[Arrival]) -> Seen:
    timeline, seen = Timeline(), Seen()
    pod = SimPod(spec, timeline, lambda output: note(seen, output, timeline.now_s), lambda name, report: None)
    for number, arrival in enumerate(arrivals):
        timeline.at(arrival[0], partial(pod.submit, request(number, arrival)))
    while pod.scheduler.has_work or len([key for key in seen if key[1] != "first"]) < len(arrivals):
        assert timeline.step()
    return seen


def note(seen: Seen, output: TokenOutput, now_s: float) -> None:
    seen.setdefault((output.request_id, "first"), (round(now_s, 6), output.cached_tokens))
    if output.finish:
        seen[output.request_id, str(output.finish)] = (round(now_s, 6), output.cached_tokens)


def real(spec: PodSpec, arrivals: Sequence[Arrival]) -> Seen:
    seen = Seen()

    async def play() -> None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        config = SchedulerConfig(spec.max_step_tokens, spec.max_running, spec.max_waiting)
        scheduler = Scheduler(PrefixCache(spec.kv_tokens // spec.block_size, spec.block_size), config)
        backend = SimBackend(PROFILE, vocab_size=2**31 - 1)
        loop = EngineLoop(
            scheduler, backend, on_changes=lambda changes: None, metrics=EngineMetrics("m"), step_deadline_s=60.0
        )

        async def user(number: int, arrival: Arrival) -> None:
            async with loop.submit([request(number, arrival)]) as stream:
                async for output in stream:
                    note(seen, output, clock() - start_s)

        task = asyncio.create_task(loop.run())
        users = []
        for number, arrival in enumerate(arrivals):
            if (wait_s := start_s + arrival[0] - clock()) > 1e-9:
                await asyncio.sleep(wait_s)  # timers for the same moment would fire in any order
            users.append(asyncio.create_task(user(number, arrival)))
        await asyncio.gather(*users)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(play())
    return seen


@given(ARRIVALS, st.sampled_from([1600, SPEC.kv_tokens]))
@settings(max_examples=30, deadline=None)
def test_an_emulated_pod_takes_the_time_of_the_real_engine(arrivals: list[Arrival], kv_tokens: int) -> None:
    """This includes simultaneous requests that share a step, and running requests that take each other's blocks."""
    spec = replace(SPEC, kv_tokens=kv_tokens)
    ours, theirs = emulated(spec, arrivals), real(spec, arrivals)
    assert ours.keys() == theirs.keys()
    for key, (at_s, cached) in theirs.items():
        assert ours[key][1] == cached
        assert ours[key][0] == pytest.approx(at_s, abs=2e-4)


@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 400))
def test_a_run_lasts_as_long_as_its_steps_and_knows_where_it_is(decodes: int, context: int, steps: int) -> None:
    def plan(grown: int) -> StepPlan:
        held = Request(1, [1], 1)
        return StepPlan(tuple(SequenceChunk(held, context + grown, (1,), (), True, True) for _ in range(decodes)))

    one_by_one_s = sum(PROFILE.step_s(plan(i)) for i in range(steps))
    first_s, sequences = PROFILE.step_s(plan(0)), len(plan(0).chunks)
    assert PROFILE.run_s(first_s, sequences, steps) == pytest.approx(one_by_one_s)
    assert PROFILE.steps_by(first_s, sequences, one_by_one_s - 1e-6) == steps
    assert PROFILE.steps_by(first_s, sequences, one_by_one_s + 1e-6) == steps + 1
    assert PROFILE.steps_by(first_s, sequences, 0.0) == 1


def test_what_a_pod_publishes_adds_up_to_what_it_holds() -> None:
    timeline, held = Timeline(), set[PrefixKey]()
    reports: list[Report] = []

    def take(name: str, report: Report) -> None:
        reports.append(report)
        held.difference_update(report.removed)
        held.update(report.stored)

    pod = SimPod(SPEC, timeline, lambda output: None, take)
    for number in range(40):
        prompt = [number % 7] * 400 + [1000 + number] * 300
        keys = tuple(KeySpan(PrefixKey(100 * (number % 7) + i), 64 * (i + 1)) for i in range(6))
        timeline.at(number * 0.03, partial(pod.submit, Request(number, prompt, 20, key_spans=keys)))
    while timeline.now_s < 30 and timeline.step():
        pass
    assert not pod.scheduler.has_work
    assert held == set(pod.scheduler.held_keys()[0])
    assert held
    assert reports[0].load.running or reports[0].load.waiting
    assert reports[-1].load.running == reports[-1].load.waiting == 0
    assert timeline.now_s > BATCH_S
