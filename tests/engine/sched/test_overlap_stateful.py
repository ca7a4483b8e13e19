"""Random traffic with two steps in flight on a device that runs them late. A request's output is the same as alone."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.sched.output import TokenOutput
from engine.sched.request import FinishReason, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import QueueFull, Scheduler, SchedulerConfig
from tests.engine.cache.integrity import check_integrity
from tests.engine.sched.checking_backend import oracle
from tests.engine.sched.in_order_backend import InOrderBackend

SETTINGS = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
)
PROMPTS = st.lists(st.sampled_from([(1, 2, 3, 4), (1, 2), (3,), (4, 4, 4, 4, 4)]), min_size=1, max_size=4).map(
    lambda parts: [token for part in parts for token in part]
)
ARRIVALS = st.tuples(
    PROMPTS,
    st.sampled_from([5, 9, 12, 1]),
    st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 1})]),
    st.builds(SamplingParams, seed=st.integers(0, 1), presence_penalty=st.sampled_from([0.0, 0.0, 0.5])),
    st.sampled_from(["", "", "tenant"]),
)
"""Prompt, max_tokens, stop tokens, sampling, salt."""
PACES = st.lists(st.sampled_from(["launch", "launch", "execute", "land"]), min_size=3, max_size=20)


class OverlapMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(6, 16),
        block_size=st.integers(1, 4),
        step_tokens=st.integers(3, 20),
        running=st.sampled_from([3, 4, 6, 1]),
        index=st.sampled_from(IndexKind),
    )
    def start(self, blocks: int, block_size: int, step_tokens: int, running: int, index: IndexKind) -> None:
        self.cache = PrefixCache(blocks, block_size, index=index)
        config = SchedulerConfig(step_tokens, min(running, step_tokens), max_waiting=8, max_overtakes=2)
        self.scheduler = Scheduler(self.cache, config)
        self.backend = InOrderBackend(self.cache, step_tokens)
        self.requests: dict[int, Request] = {}
        self.next_id = 0

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=4), twin=st.booleans())
    def add(self, arrivals: list[tuple[Any, ...]], twin: bool) -> None:
        for prompt, max_tokens, stop, sampling, salt in [*arrivals, *arrivals[:twin]]:
            request = Request(self.next_id, prompt, max_tokens, sampling, stop, salt=salt)
            self.next_id += 1
            try:
                self.scheduler.add(request)
            except (QueueFull, ValueError):
                continue
            self.requests[request.id] = request

    @precondition(lambda self: self.requests)
    @rule(pace=PACES)
    def go(self, pace: list[str]) -> None:
        for move in pace:
            getattr(self, move)()
            self.is_sound()

    def launch(self) -> None:
        """Launch a step, unless the scheduler says that the step in progress must end first."""
        if len(self.backend.in_flight) == 2:
            return
        if self.backend.in_flight:
            plan = self.scheduler.schedule_ahead()
        else:
            plan = self.scheduler.schedule()
            assert (plan is not None) == bool(self.requests), "work waits, but nothing runs"
        if plan is not None:
            self.backend.launch(plan)

    def execute(self) -> None:
        if self.backend.launched:
            self.backend.execute()

    def land(self) -> None:
        if not self.backend.executed:
            return
        plan, _ = self.backend.executed[0]
        outputs = self.scheduler.complete(self.backend.land())
        expected = [c.request.id for c in plan.chunks if c.samples and self.requests.get(c.request.id) is c.request]
        assert [output.request_id for output in outputs] == expected
        for output in outputs:
            self.check_output(output)

    def check_output(self, output: TokenOutput) -> None:
        request = self.requests[output.request_id]
        expected = oracle(request)
        assert output.token is not None
        assert request.output_tokens[-1] == output.token.token
        assert request.output_tokens == expected[: len(request.output_tokens)]
        assert 0 <= output.cached_tokens < len(request.prompt_tokens)
        assert (output.finish is not None) == (len(request.output_tokens) == len(expected))
        if output.finish is not None:
            is_stop = expected[-1] in request.stop_token_ids
            assert output.finish is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            del self.requests[request.id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), reuse=st.booleans())
    def abort(self, data: st.DataObject, reuse: bool) -> None:
        """Abort a request at any moment; the id may be given to another request at once."""
        request = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        assert self.scheduler.abort(request.id)
        assert not self.scheduler.abort(request.id)
        if reuse and self.scheduler.load().waiting < 8:
            successor = Request(request.id, request.prompt_tokens, request.max_tokens)
            self.scheduler.add(successor)
            self.requests[request.id] = successor

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_cache()

    @precondition(lambda self: self.backend.in_flight)
    @rule(really=st.sampled_from([False, False, True]))
    def fail(self, really: Any) -> None:
        if not really:
            return
        planned = dict.fromkeys(c.request for plan in self.backend.in_flight for c in plan.chunks)
        lost = [request.id for request in planned if self.requests.get(request.id) is request]
        self.backend.lose()
        assert self.scheduler.fail_step() == lost
        for request_id in lost:
            del self.requests[request_id]

    @invariant()
    def is_sound(self) -> None:
        check_integrity(self.cache)
        self.backend.check_fences()
        assert self.scheduler.has_work == bool(self.requests or self.backend.in_flight)
        if not self.backend.in_flight:
            assert not self.cache._fenced
            assert all(entry.planned_tokens == entry.computed_tokens for entry in self.scheduler._running)
        load = self.scheduler.load()
        assert load.running + load.waiting == len(self.requests)
        held = {b for s in self.cache._users for b in (*s.blocks, *s.nodes, s.source) if b is not None}
        assert load.blocks_free == load.blocks_total - len(held)

    def teardown(self) -> None:
        """End everything that is left, and check that all blocks come back."""
        if not hasattr(self, "cache"):
            return
        bound = 10 + sum(10 * (len(r.prompt_tokens) + r.max_tokens) for r in self.requests.values())
        for _ in range(bound):
            for move in (self.launch, self.launch, self.execute, self.land):
                move()
            if not self.scheduler.has_work:
                break
        assert not self.requests, f"not finished after {bound} steps"
        assert not self.cache._fenced, "a fence was not released"
        assert self.cache.pool.available == self.cache.pool.total
        check_integrity(self.cache)


def test_outputs_equal_the_oracle_with_steps_in_flight() -> None:
    run_state_machine_as_test(OverlapMachine, settings=SETTINGS)
