"""Random traffic on a backend that checks every step. A request's output is the same as when it runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
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
from engine.sched.plan import StepPlan
from engine.sched.request import FinishReason, Request, ToolUse
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import QueueFull, Scheduler, SchedulerConfig
from tests.engine.cache.integrity import check_integrity
from tests.engine.sched.checking_backend import CheckingBackend, oracle

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
    st.sampled_from([frozenset(), frozenset(), frozenset({0})]),
    st.integers(0, 1),
    st.sampled_from(["", "", "tenant"]),
)
"""Prompt, max_tokens, stop tokens, seed, salt."""
TOOLS = st.sampled_from([None, ToolUse(True, False), ToolUse(True, True)])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        step_tokens=st.integers(3, 20),
        running=st.sampled_from([3, 4, 6, 1]),
        overtakes=st.integers(0, 3),
        index=st.sampled_from(IndexKind),
        kept=st.integers(0, 8),
    )
    def start(
        self, blocks: int, block_size: int, step_tokens: int, running: int, overtakes: int, index: IndexKind, kept: int
    ) -> None:
        self.cache = PrefixCache(blocks, block_size, index=index, learnt_blocks=kept)
        config = SchedulerConfig(step_tokens, min(running, step_tokens), max_waiting=8, max_overtakes=overtakes)
        self.scheduler = Scheduler(self.cache, config)
        self.backend = CheckingBackend(self.cache, step_tokens)
        self.requests: dict[int, Request] = {}
        self.next_id = 0

    @rule(arrivals=st.lists(ARRIVALS, min_size=2, max_size=6), tools=TOOLS)
    def add(self, arrivals: list[tuple[Any, ...]], tools: ToolUse | None) -> None:
        for prompt, max_tokens, stop, seed, salt in arrivals:
            request = Request(self.next_id, prompt, max_tokens, SamplingParams(seed=seed), stop, salt=salt, tools=tools)
            self.next_id += 1
            never_fits = self.cache.blocks_for(len(prompt) + max_tokens - 1) > self.cache.pool.total
            is_full = self.scheduler.load().waiting >= 8
            if is_full or never_fits:
                with pytest.raises(QueueFull if is_full else ValueError):
                    self.scheduler.add(request)
            else:
                self.scheduler.add(request)
                self.requests[request.id] = request

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step(aborted=[])
            self.is_sound()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), reset=st.sampled_from([False, False, False, True]))
    def step_with_aborts(self, data: st.DataObject, reset: bool) -> None:
        self.one_step(self.draw_requests(data), reset=reset)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        for request_id in self.draw_requests(data)[:1]:
            self.abort_one(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def failing_step(self, data: st.DataObject, really: bool) -> None:
        """Let the backend raise after it has written; some requests were aborted meanwhile."""
        plan = self.schedule() if really else None
        if plan is None:
            return
        self.backend.run(plan)
        for request_id in self.draw_requests(data):
            self.abort_one(request_id)
        planned = [chunk.request.id for chunk in plan.chunks if chunk.request.id in self.requests]
        assert self.scheduler.fail_step() == planned
        for request_id in planned:
            del self.requests[request_id]

    def draw_requests(self, data: st.DataObject) -> list[int]:
        if not self.requests:
            return []
        drawn: list[int] = data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=2, unique=True))
        return drawn

    def abort_one(self, request_id: int) -> None:
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        del self.requests[request_id]

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        assert (plan is not None) == bool(self.requests), "work waits, but nothing runs"
        return plan

    def one_step(self, aborted: list[int], *, reset: bool = False) -> None:
        plan = self.schedule()
        if plan is None:
            return
        result = self.backend.run(plan)
        available = self.obtainable()
        for request_id in aborted:
            self.abort_one(request_id)
        if reset:
            self.scheduler.reset_cache()
        assert self.obtainable() == available, "blocks of a step in progress came free"
        outputs = self.scheduler.complete(result)
        expected = [c.request.id for c in plan.chunks if c.samples and c.request.id in self.requests]
        assert [output.request_id for output in outputs] == expected
        for output in outputs:
            self.check_output(output)

    def obtainable(self) -> int:
        """Return the number of blocks that no request computes with, including pinned ones."""
        return self.cache.pool.available + self.cache.learnt.spare + self.cache.pins.spare

    def check_output(self, output: TokenOutput) -> None:
        request = self.requests[output.request_id]
        assert output.token is not None
        assert request.output_tokens[-1] == output.token.token
        expected = oracle(request)
        assert request.output_tokens == expected[: len(request.output_tokens)]
        assert 0 <= output.cached_tokens < len(request.prompt_tokens)
        if len(request.output_tokens) == len(expected):
            is_stop = expected[-1] in request.stop_token_ids
            assert output.finish is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            del self.requests[request.id]
        else:
            assert output.finish is None

    @invariant()
    def is_sound(self) -> None:
        check_integrity(self.cache)
        assert self.scheduler.has_work == bool(self.requests)
        load = self.scheduler.load()
        assert load.running + load.waiting == len(self.requests)
        assert load.running <= 6
        assert load.blocks_free == load.blocks_total - len({*self.blocks_in_use()})
        assert load.uncached_tokens == self.brute_force_uncached()

    def blocks_in_use(self) -> Iterator[int | None]:
        for entry in self.scheduler._running:
            yield from entry.sequence.blocks
            yield from entry.sequence.nodes
            if entry.sequence.source is not None:
                yield entry.sequence.source

    def brute_force_uncached(self) -> int:
        """Return the uncached tokens with every request matched from the start."""
        total = 0
        for entry in self.scheduler._entries.values():
            if entry.request.id in self.scheduler._waiting:
                tokens = [*entry.request.prompt_tokens, *entry.request.output_tokens]
                fresh = self.cache.open(tokens, entry.request.salt)
                total += len(tokens) - self.cache.count_hits(fresh, len(tokens))
            else:
                total += max(entry.prefill_end - entry.computed_tokens, 0)
        return total

    def teardown(self) -> None:
        """End everything that is left, and check that all blocks come back."""
        if not hasattr(self, "cache"):
            return
        bound = sum(8 * (len(r.prompt_tokens) + r.max_tokens) for r in self.requests.values())
        for _ in range(bound):
            if not self.requests:
                break
            self.one_step(aborted=[])
        assert not self.requests, f"not finished after {bound} steps"
        self.cache.learnt.clear()
        assert self.cache.pool.available == self.cache.pool.total
        check_integrity(self.cache)


def test_outputs_equal_the_oracle_under_any_traffic() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
