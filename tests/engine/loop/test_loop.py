"""The step loop with the real scheduler and cache: virtual time, emulated and scripted backends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest

from engine.backend.base import Backend
from engine.backend.profiles import SimProfile
from engine.backend.sim import SimBackend
from engine.cache.changes import KeyChanges
from engine.cache.prefix_cache import PrefixCache
from engine.contract.keys import PrefixKey
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import MAX_FAILURES_IN_A_ROW, EngineLoop, RequestRefused, StepFailed, TokenStream
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import FinishReason, KeySpan, Request
from engine.sched.scheduler import QueueFull, Scheduler, SchedulerConfig, TokenOutput

BLOCKS, BLOCK = 64, 16
STEP_S = 0.01
SLOW = SimProfile("test", w0_ms=10, a_ms=0, c1_ms=0, c2_ms=0, c3_ms=0, c4_ms=0, kv_tokens=0)
pytestmark = pytest.mark.looptime


class Script:
    """A scripted backend: each step fails, or answers token 7 after a wait."""

    max_in_flight = 1

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes = list(outcomes)
        self.plans: list[StepPlan] = []

    async def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        await asyncio.sleep(STEP_S)
        outcome = self._outcomes.pop(0) if self._outcomes else None
        if outcome is not None:
            raise outcome
        return StepResult({c.request.id: SampledToken(7) for c in plan.chunks if c.samples}, STEP_S)

    async def close(self) -> None:
        """Nothing to free."""


class Bench:
    """A loop with its scheduler, cache and backend."""

    def __init__(
        self, backend: Backend, *, max_waiting: int = 8, max_running: int = 4, step_deadline_s: float = 60.0
    ) -> None:
        self.cache = PrefixCache(BLOCKS, BLOCK)
        self.scheduler = Scheduler(
            self.cache, SchedulerConfig(max_step_tokens=64, max_running=max_running, max_waiting=max_waiting)
        )
        self.changes: list[KeyChanges] = []
        self.metrics = EngineMetrics("m")
        self.loop = EngineLoop(
            self.scheduler,
            backend,
            on_changes=self.changes.append,
            metrics=self.metrics,
            step_deadline_s=step_deadline_s,
        )

    def failures(self) -> float | None:
        return self.metrics.registry.get_sample_value("warmroute_step_failures_total", {"model_name": "m"})


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bench.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert not bench.loop._queued_s, "a request that has left is forgotten"


def request(id_: int, *, prompt: Iterable[int] = range(20), max_tokens: int = 4, keys: int = 0) -> Request:
    spans = tuple(KeySpan(PrefixKey(1000 + i), BLOCK * (i + 1)) for i in range(keys))
    return Request(id=id_, prompt_tokens=list(prompt), max_tokens=max_tokens, key_spans=spans)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(STEP_S / 4)


async def _read_all(stream: TokenStream) -> list[TokenOutput]:
    return [output async for output in stream]


def sim() -> SimBackend:
    return SimBackend(SLOW, vocab_size=100)


async def test_outputs_come_step_by_step_and_end_with_a_reason() -> None:
    bench = Bench(sim())
    async with running(bench), bench.loop.submit([request(1, max_tokens=3)]) as stream:
        times, outputs = [], []
        async for output in stream:
            times.append(asyncio.get_running_loop().time())
            outputs.append(output)
    assert [output.finish for output in outputs] == [None, None, FinishReason.LENGTH]
    assert [round(b - a, 6) for a, b in itertools.pairwise(times)] == [STEP_S, STEP_S]
    assert bench.loop.open_requests == 0


async def test_requests_submitted_together_share_a_stream() -> None:
    bench = Bench(sim())
    async with running(bench), bench.loop.submit([request(i, max_tokens=i) for i in (1, 2, 3)]) as stream:
        ids = [output.request_id async for output in stream]
    assert sorted(ids) == [1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("how", ["return", "raise", "cancel"])
async def test_leaving_the_context_in_any_way_frees_the_blocks_within_a_step(how: str) -> None:
    bench = Bench(sim())

    async def use() -> None:
        async with bench.loop.submit([request(1, max_tokens=200), request(2, max_tokens=200)]) as stream:
            await anext(stream)
            assert bench.cache.pool.available < BLOCKS
            if how == "raise":
                raise LookupError
            if how == "cancel":
                await asyncio.sleep(3600)

    async with running(bench):
        task = asyncio.create_task(use())
        if how == "cancel":
            await wait_until(lambda: bench.cache.pool.available < BLOCKS)
            await asyncio.sleep(2.5 * STEP_S)  # in the middle of a step
            task.cancel()
        await asyncio.wait([task])
        left_s = asyncio.get_running_loop().time()
        await wait_until(lambda: bench.cache.pool.available == BLOCKS)
        assert asyncio.get_running_loop().time() - left_s <= STEP_S + STEP_S / 4
        assert not bench.scheduler.has_work
        assert bench.loop.open_requests == 0


async def test_one_of_several_can_be_ended_alone() -> None:
    bench = Bench(sim())
    seen = []
    async with running(bench), bench.loop.submit([request(1), request(2)]) as stream:
        async for output in stream:
            seen.append(output.request_id)
            if output.request_id == 1:
                stream.abort(1)
    assert seen.count(1) == 1
    assert seen.count(2) == 4


async def test_a_failed_step_fails_its_requests_and_the_loop_goes_on() -> None:
    bench = Bench(Script(None, RuntimeError("device lost")))
    async with running(bench):
        async with bench.loop.submit([request(1)]) as stream:
            await anext(stream)
            with pytest.raises(StepFailed, match="device lost"):
                await anext(stream)
        assert bench.cache.pool.available == BLOCKS
        async with bench.loop.submit([request(2)]) as stream:
            assert len([output async for output in stream]) == 4
    assert bench.failures() == 1


async def fail_once(bench: Bench, request_id: int) -> None:
    async with bench.loop.submit([request(request_id)]) as stream:
        with pytest.raises(StepFailed, match="the step that computed this request failed: device lost"):
            await anext(stream)


async def test_after_many_failed_steps_in_a_row_the_loop_ends() -> None:
    """A card does not recover from some errors. The last request still gets its own step's error."""
    lost = RuntimeError("device lost")
    bench = Bench(Script(*[lost] * 99))
    async with running(bench) as task:
        for i in range(MAX_FAILURES_IN_A_ROW):
            assert bench.loop.is_alive
            await fail_once(bench, i)
        await asyncio.wait([task])
        assert not bench.loop.is_alive
        error = task.exception()
        assert str(error) == "8 steps in a row have failed"
        assert error is not None
        assert error.__cause__ is lost
        with pytest.raises(StepFailed, match="stopped"):
            async with bench.loop.submit([request(99)]):
                pass
    assert bench.failures() == MAX_FAILURES_IN_A_ROW
    assert bench.cache.pool.available == BLOCKS


async def test_a_step_between_failed_ones_keeps_the_loop() -> None:
    almost = [RuntimeError("device lost")] * (MAX_FAILURES_IN_A_ROW - 1)
    bench = Bench(Script(*almost, None, *almost))
    async with running(bench):
        for i in range(len(almost)):
            await fail_once(bench, i)
        async with bench.loop.submit([request(100, max_tokens=1)]) as stream:
            assert len(await _read_all(stream)) == 1
        for i in range(len(almost)):
            await fail_once(bench, 200 + i)
        async with bench.loop.submit([request(300)]) as stream:
            assert len(await _read_all(stream)) == 4
    assert bench.failures() == 2 * len(almost)


class Hanging(Script):
    """A backend whose second step, and the steps after it, never end."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__()
        self.max_in_flight = max_in_flight

    async def run(self, plan: StepPlan) -> StepResult:
        is_first = not self.plans
        result = await super().run(plan)
        if not is_first:
            await asyncio.Event().wait()
        return result


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_a_step_that_never_ends_is_taken_for_a_lost_device(max_in_flight: int) -> None:
    bench = Bench(Hanging(max_in_flight), step_deadline_s=30.0)
    async with running(bench) as task:
        async with bench.loop.submit([request(1)]) as stream:
            await anext(stream)
            begun_s = asyncio.get_running_loop().time()
            await asyncio.sleep(29)
            assert bench.loop.is_alive
            with pytest.raises(StepFailed, match="a step has not ended within 30 s"):
                await _read_all(stream)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(30, abs=2 * STEP_S)
        await asyncio.wait([task])
        assert not bench.loop.is_alive
        assert bench.loop.is_stuck
        with pytest.raises(StepFailed, match="stopped"):
            async with bench.loop.submit([request(2)]):
                pass
    assert bench.failures() == 1


async def test_a_step_that_hangs_behind_a_failed_one_is_found_too() -> None:
    class Broken(Hanging):
        async def run(self, plan: StepPlan) -> StepResult:
            if not self.plans:
                self.plans.append(plan)
                await asyncio.sleep(STEP_S)
                raise RuntimeError("device lost")
            return await super().run(plan)

    bench = Bench(Broken(2), step_deadline_s=30.0)
    async with running(bench) as task:
        async with bench.loop.submit([request(1)]) as stream:
            with pytest.raises(StepFailed):
                await _read_all(stream)
        await asyncio.wait([task])
        assert bench.loop.is_stuck


async def test_long_steps_and_a_backends_own_timeouts_are_no_lost_device() -> None:
    class Slow(Script):
        async def run(self, plan: StepPlan) -> StepResult:
            await asyncio.sleep(29)
            return await super().run(plan)

    bench = Bench(Slow(None, None, TimeoutError("a copy")), step_deadline_s=30.0)
    async with running(bench):
        async with bench.loop.submit([request(1)]) as stream:
            await anext(stream)
            await anext(stream)
            with pytest.raises(StepFailed, match="a copy"):
                await anext(stream)
        assert bench.loop.is_alive


async def test_an_answer_without_a_token_that_is_due_is_a_failed_step() -> None:
    class Forgetful(Script):
        async def run(self, plan: StepPlan) -> StepResult:
            return StepResult()

    bench = Bench(Forgetful())
    async with running(bench):
        async with bench.loop.submit([request(1)]) as stream:
            with pytest.raises(StepFailed):
                await anext(stream)
        assert bench.loop.is_alive


async def test_a_defect_of_the_scheduler_ends_the_loop_and_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(sim())
    async with running(bench) as task:
        async with bench.loop.submit([request(1, max_tokens=100)]) as stream:
            await anext(stream)

            def broken() -> None:
                raise AssertionError("a defect")

            monkeypatch.setattr(bench.scheduler, "schedule", broken)
            with pytest.raises(StepFailed, match="stopped"):
                await _read_all(stream)
        await asyncio.wait([task])
        assert isinstance(task.exception(), AssertionError)
        assert not bench.loop.is_alive
        with pytest.raises(StepFailed):
            async with bench.loop.submit([request(2)]):
                pass


async def test_stopping_the_loop_ends_every_request() -> None:
    bench = Bench(sim())
    async with running(bench) as task, bench.loop.submit([request(1, max_tokens=100)]) as stream:
        await anext(stream)
        task.cancel()
        with pytest.raises(StepFailed):
            await _read_all(stream)


async def test_a_full_queue_refuses_all_of_a_submission() -> None:
    bench = Bench(sim(), max_waiting=2, max_running=1)
    async with running(bench), bench.loop.submit([request(1, max_tokens=50)]) as first:
        await anext(first)
        with pytest.raises(QueueFull):
            async with bench.loop.submit([request(i) for i in (2, 3, 4)]):
                pass
        assert bench.scheduler.load().waiting == 0
        assert bench.loop.open_requests == 1


async def test_a_request_larger_than_the_pool_is_refused() -> None:
    bench = Bench(sim())
    with pytest.raises(RequestRefused, match="KV blocks"):
        async with bench.loop.submit([request(1, max_tokens=BLOCKS * BLOCK)]):
            pass


async def test_a_reader_that_never_reads_delays_nobody() -> None:
    bench = Bench(sim())
    async with running(bench), bench.loop.submit([request(1, max_tokens=50)]) as lazy:
        async with bench.loop.submit([request(2, max_tokens=60)]) as stream:
            assert len([output async for output in stream]) == 60
        assert len([output async for output in lazy]) == 50


async def test_changes_of_held_keys_are_reported_after_the_step_that_makes_them() -> None:
    bench = Bench(sim())
    async with running(bench):
        async with bench.loop.submit([request(1, keys=1)]) as stream:
            await anext(stream)
            assert [key for change in bench.changes for key, _ in change.stored] == [1000]
            async for _ in stream:
                pass
        assert bench.scheduler.held_keys()[0] == (1000,)
        assert bench.loop.reset_cache() == 1
    assert [key for change in bench.changes for key in change.removed] == [1000]
    assert bench.scheduler.held_keys() == ((), (), ())


async def test_an_idle_loop_starts_at_once_when_work_comes() -> None:
    bench = Bench(sim())
    async with running(bench):
        await asyncio.sleep(100)
        started_s = asyncio.get_running_loop().time()
        async with bench.loop.submit([request(1, max_tokens=1)]) as stream:
            await anext(stream)
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(STEP_S)
