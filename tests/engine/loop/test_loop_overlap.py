"""The step loop over a backend that takes two steps: what overlaps, and that the tokens stay the same."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.changes import KeyChanges
from engine.cache.prefix_cache import PrefixCache
from engine.contract.keys import PrefixKey
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import EngineLoop, StepFailed, TokenStream
from engine.sched.plan import PENDING
from engine.sched.request import FinishReason, KeySpan, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig, TokenOutput
from tests.engine.cache.integrity import check_integrity
from tests.engine.loop.virtual_device import VirtualDevice
from tests.engine.sched.checking_backend import oracle

STEP_S = 0.01
STEP_TOKENS = 16


class Bench:
    """A loop with its scheduler, cache and backend."""

    def __init__(self, *, in_flight: int = 2, blocks: int = 60, block_size: int = 4, **device: object) -> None:
        self.cache = PrefixCache(blocks, block_size)
        self.scheduler = Scheduler(self.cache, SchedulerConfig(STEP_TOKENS, max_running=6, max_waiting=50))
        self.device = VirtualDevice(self.cache, STEP_TOKENS, max_in_flight=in_flight, **device)  # type: ignore[arg-type]
        self.metrics = EngineMetrics("m")
        self.changes: list[KeyChanges] = []
        self.loop = EngineLoop(
            self.scheduler, self.device, on_changes=self.changes.append, metrics=self.metrics, step_deadline_s=60.0
        )

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m"})

    def is_clean(self) -> bool:
        """Whether nothing is held, fenced or pending."""
        check_integrity(self.cache)
        return self.cache.pool.available == self.cache.pool.total and not self.scheduler.has_work


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bench.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert bench.device.closed_calls == len(bench.device.steps), "a call of the backend was not closed"


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(STEP_S / 8)


async def read_all(stream: TokenStream) -> list[TokenOutput]:
    return [output async for output in stream]


def tokens_of(outputs: Sequence[TokenOutput], request_id: int) -> list[int]:
    return [o.token.token for o in outputs if o.request_id == request_id and o.token]


@pytest.mark.looptime
async def test_a_step_is_given_before_the_tokens_of_the_one_before_are_known() -> None:
    bench = Bench(host_s=STEP_S / 2)
    async with running(bench), bench.loop.submit([Request(1, [1, 2, 3], 12)]) as stream:
        outputs = await read_all(stream)
    assert tokens_of(outputs, 1) == oracle(Request(1, [1, 2, 3], 12))
    steps = bench.device.steps
    assert len(steps) == 12
    assert all(after.given_s < before.known_s for before, after in itertools.pairwise(steps))
    assert all(step.plan.chunks[0].tokens == (PENDING,) for step in steps[1:])


@pytest.mark.looptime
@pytest.mark.parametrize("host_s", [0.0, 0.4 * STEP_S, 0.99 * STEP_S, 1.7 * STEP_S])
async def test_the_device_waits_only_for_what_the_host_takes_beyond_a_step(host_s: float) -> None:
    idle: dict[int, list[float]] = {}
    for in_flight in (1, 2):
        bench = Bench(in_flight=in_flight, host_s=host_s)
        async with running(bench), bench.loop.submit([Request(i, [i, 2, 3], 12) for i in (1, 2, 3)]) as stream:
            await read_all(stream)
        idle[in_flight] = bench.device.idle_s()
    assert idle[1] == pytest.approx([host_s] * 11)
    assert idle[2] == pytest.approx([0.0, *[max(0.0, host_s - STEP_S)] * 10], abs=1e-9)


@pytest.mark.looptime
async def test_a_device_that_answers_at_once_is_given_what_was_planned() -> None:
    """The tokens must not become known between the planning of the next step and the call that starts it."""
    bench = Bench(step_s=lambda number: 0.0)
    async with running(bench), bench.loop.submit([Request(1, [1, 2, 3], 12)]) as stream:
        assert tokens_of(await read_all(stream), 1) == oracle(Request(1, [1, 2, 3], 12))
    assert sum(PENDING in chunk.tokens for step in bench.device.steps for chunk in step.plan.chunks) == 11


@pytest.mark.looptime
async def test_a_stop_token_found_late_costs_one_unseen_token_and_no_block() -> None:
    answers = [Request(1, [n], 50, stop_token_ids=frozenset({0})) for n in range(20)]
    request = next(request for request in answers if 3 < len(oracle(request)) < 20)
    expected = oracle(request)
    bench = Bench()
    async with running(bench):
        async with bench.loop.submit([request]) as stream:
            outputs = await read_all(stream)
        await wait_until(bench.is_clean)
    assert (tokens_of(outputs, 1), outputs[-1].finish) == (expected, FinishReason.STOP)
    assert len(bench.device.steps) == len(expected) + 1
    assert bench.sample("vllm:generation_tokens_total") == len(expected)
    assert bench.scheduler.stats().generated_tokens == len(expected)


@pytest.mark.looptime
@pytest.mark.parametrize("when", [0.2, 0.7, 1.2, 1.7, 3.5, 5.9])
async def test_a_client_that_leaves_frees_its_blocks_when_the_steps_in_flight_have_ended(when: float) -> None:
    bench = Bench()
    async with running(bench):
        async with bench.loop.submit([Request(2, [5, 6, 7], 30)]) as stays:
            async with bench.loop.submit([Request(1, list(range(30)), 30)]):
                await asyncio.sleep(when * STEP_S)
            left_s = asyncio.get_running_loop().time()
            stayed = bench.scheduler._entries[2].sequence
            await wait_until(lambda: bench.cache._users == {stayed})
            assert asyncio.get_running_loop().time() - left_s <= 2.25 * STEP_S
            assert tokens_of(await read_all(stays), 2) == oracle(Request(2, [5, 6, 7], 30))
        await wait_until(bench.is_clean)


@pytest.mark.looptime
async def test_a_failed_step_takes_the_one_behind_it_along_and_nothing_else() -> None:
    bench = Bench(failing=frozenset({3}))
    async with running(bench):
        async with bench.loop.submit([Request(1, [1, 2, 3], 20)]) as stream:
            with pytest.raises(StepFailed, match="device lost"):
                await read_all(stream)
            assert bench.is_clean()
        failed_steps = len(bench.device.steps)
        async with bench.loop.submit([Request(2, [1, 2, 3], 5)]) as stream:
            assert tokens_of(await read_all(stream), 2) == oracle(Request(2, [1, 2, 3], 5))
    assert failed_steps == 5, "the fifth was in flight when the fourth failed"
    assert bench.sample("warmroute_step_failures_total") == 1
    assert (bench.scheduler.stats().failed_steps, bench.scheduler.stats().failed) == (2, 1)


@pytest.mark.looptime
async def test_requests_of_the_step_behind_a_failed_one_fail_with_it_and_those_that_wait_go_on() -> None:
    bench = Bench(failing=frozenset({0}))
    first, second, third = [Request(i, [i] * STEP_TOKENS, i) for i in (1, 2, 3)]
    async with running(bench):
        async with bench.loop.submit([first, second]) as lost, bench.loop.submit([third]) as kept:
            assert tokens_of(await read_all(kept), 3) == oracle(third)
            with pytest.raises(StepFailed):
                await read_all(lost)
        await wait_until(bench.is_clean)
    assert [[c.request.id for c in step.plan.chunks] for step in bench.device.steps[:3]] == [[1], [2], [3]]
    assert bench.scheduler.stats().failed == 2


@pytest.mark.looptime
@pytest.mark.parametrize("when", [0.5, 1.5, 2.5])
async def test_stopping_the_loop_ends_both_calls_and_every_request(when: float) -> None:
    bench = Bench()
    async with running(bench) as task, bench.loop.submit([Request(1, [1, 2, 3], 50)]) as stream:
        await asyncio.sleep(when * STEP_S)
        assert len(bench.device.steps) - bench.device.closed_calls == 2
        task.cancel()
        with pytest.raises(StepFailed, match="stopped"):
            await read_all(stream)
    assert not bench.loop.is_alive


@pytest.mark.looptime
async def test_a_defect_of_the_scheduler_leaves_no_call_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    async with running(bench) as task, bench.loop.submit([Request(1, [1, 2, 3], 50)]) as stream:
        await anext(stream)

        def broken() -> None:
            raise AssertionError("a defect")

        monkeypatch.setattr(bench.scheduler, "schedule_ahead", broken)
        with pytest.raises(StepFailed, match="stopped"):
            await read_all(stream)
        await asyncio.wait([task])
        assert isinstance(task.exception(), AssertionError)


@pytest.mark.looptime
async def test_a_cache_reset_in_flight_publishes_nothing_of_what_was_computed_before_it() -> None:
    spans = tuple(KeySpan(PrefixKey(100 + i), 4 * (i + 1)) for i in range(10))
    bench = Bench()
    async with running(bench):
        async with bench.loop.submit([Request(1, list(range(40)), 8, key_spans=spans)]) as stream:
            await wait_until(lambda: bool(bench.changes))
            bench.loop.reset_cache()
            await read_all(stream)
        await wait_until(bench.is_clean)
        stored = [key for change in bench.changes for key, _ in change.stored]
        removed = [key for change in bench.changes for key in change.removed]
        assert sorted(stored) == sorted(removed) == [100, 101, 102, 103]
        assert bench.scheduler.held_keys()[0] == ()


SAMPLINGS = st.builds(
    SamplingParams, seed=st.integers(0, 3), repetition_penalty=st.sampled_from([1.0, 1.0, 1.1]), logprobs=st.just(None)
)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 40),  # half steps after which the request is submitted
        st.lists(st.sampled_from([(1, 2, 3, 4), (1, 2), (3,)]), min_size=1, max_size=8),
        st.integers(1, 12),
        st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 1, 2})]),
        SAMPLINGS,
        st.integers(1, 3),  # choices of the same prompt
        st.sampled_from([None, None, None, 1, 4]),  # outputs after which the client leaves
    ),
    min_size=1,
    max_size=5,
)


@given(ARRIVALS, st.integers(24, 60), st.sampled_from([0.0, STEP_S / 3]), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_tokens_are_those_of_the_loop_that_waits_for_every_step(
    arrivals: Any, blocks: int, host_s: float, rng: random.Random
) -> None:
    paces = [rng.choice([0.0, 0.2, 1.0, 3.0]) * STEP_S for _ in range(50)]
    seen = {n: play(arrivals, blocks, n, lambda number: paces[number % 50], host_s) for n in (1, 2)}
    assert seen[1].keys() == seen[2].keys()
    for key, tokens in seen[1].items():
        assert seen[2][key] == tokens


def play(
    arrivals: Any, blocks: int, in_flight: int, step_s: Callable[[int], float], host_s: float
) -> dict[int, list[int]]:
    """Return request id -> its tokens, or as many of them as its client read."""
    seen: dict[int, list[int]] = {}
    bench = Bench(in_flight=in_flight, blocks=blocks, step_s=step_s, host_s=host_s)

    async def user(number: int, arrival: Any) -> None:
        half_steps, parts, max_tokens, stop, sampling, choices, leaves = arrival
        await asyncio.sleep(half_steps * STEP_S / 2)
        prompt = [token for part in parts for token in part]
        requests = [Request(10 * number + i, prompt, max_tokens, sampling, stop) for i in range(choices)]
        async with bench.loop.submit(requests) as stream:
            async for output in stream:
                assert output.token is not None
                tokens = seen.setdefault(output.request_id, [])
                tokens.append(output.token.token)
                if output.finish is not None:
                    request = next(r for r in requests if r.id == output.request_id)
                    assert tokens == request.output_tokens == oracle(request)
                elif len(tokens) == leaves:
                    stream.abort(output.request_id)

    async def everyone() -> None:
        async with running(bench):
            await asyncio.gather(*(user(*numbered) for numbered in enumerate(arrivals)))
            await wait_until(bench.is_clean)

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(everyone())
    return seen
