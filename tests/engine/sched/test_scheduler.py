"""What the scheduler promises, one promise per test."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.contract.events import Tier
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import FinishReason, KeySpan, Request
from engine.sched.scheduler import QueueFull, Scheduler, SchedulerConfig, TokenOutput
from tests.engine.cache.integrity import check_integrity
from tests.engine.sched.checking_backend import CheckingBackend


def make(
    blocks: int = 100,
    block_size: int = 4,
    step_tokens: int = 64,
    running: int = 8,
    waiting: int = 50,
    overtakes: int = 4,
) -> Scheduler:
    return Scheduler(PrefixCache(blocks, block_size), SchedulerConfig(step_tokens, running, waiting, overtakes))


def finish_step(scheduler: Scheduler, plan: StepPlan, token: int = 1) -> list[TokenOutput]:
    sampled = {chunk.request.id: SampledToken(token) for chunk in plan.chunks if chunk.samples}
    return scheduler.complete(StepResult(sampled, elapsed_s=0.01))


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    finish_step(scheduler, plan)
    return plan


def drain(scheduler: Scheduler, max_steps: int = 1000) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler))
        assert len(plans) < max_steps
    return plans


def ids(plan: StepPlan) -> list[int]:
    return [chunk.request.id for chunk in plan.chunks]


def test_one_step_mixes_decodes_and_prefill_chunks_within_its_budget() -> None:
    scheduler = make(step_tokens=10)
    scheduler.add(Request(0, [1, 2, 3], max_tokens=5))
    step(scheduler)
    scheduler.add(Request(1, list(range(20)), max_tokens=5))
    plan = step(scheduler)
    assert [(c.request.id, c.start, len(c.tokens), c.samples, c.decodes) for c in plan.chunks] == [
        (0, 3, 1, True, True),
        (1, 0, 8, False, False),  # nine would fit: chunks end at block edges
    ]


def test_identical_prompts_in_flight_are_computed_once() -> None:
    scheduler = make(step_tokens=16, blocks=200)
    for i in range(5):
        scheduler.add(Request(i, list(range(40)), max_tokens=2))
    drain(scheduler)
    last_block_each = 4 * 4
    assert scheduler.stats().prefill_tokens == 40 + last_block_each
    assert scheduler.stats().prompt_tokens_hit == 4 * 36


def test_nobody_waits_for_a_block_that_could_not_be_reused() -> None:
    """The last token of a prompt is always computed. So a prompt that ends with a block does not reuse this block."""
    scheduler = make(step_tokens=6, running=4)
    scheduler.add(Request(0, list(range(12)), max_tokens=1))
    assert ids(step(scheduler)) == [0]
    scheduler.add(Request(1, list(range(8)), max_tokens=1))
    scheduler.add(Request(2, list(range(9)), max_tokens=1))
    plan = step(scheduler)
    assert [(each.request.id, each.start) for each in plan.chunks] == [(0, 4), (1, 4)]
    assert 2 not in ids(plan), "this one can reuse the block, so it waits"


def test_waiting_for_an_aborted_owner_ends() -> None:
    scheduler = make(step_tokens=8)
    scheduler.add(Request(0, list(range(40)), max_tokens=2))
    scheduler.add(Request(1, list(range(40)), max_tokens=2))
    assert ids(step(scheduler)) == [0]
    scheduler.abort(0)
    plan = step(scheduler)
    assert ids(plan) == [1]
    assert plan.chunks[0].start == 8


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    scheduler = make()
    scheduler.add(Request(0, list(range(10)), max_tokens=1))
    drain(scheduler)
    scheduler.add(Request(1, list(range(10)), max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert finish_step(scheduler, plan) == [TokenOutput(1, SampledToken(1), None, cached_tokens=8)]


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    scheduler = make()
    scheduler.add(Request(0, list(range(10, 16)), max_tokens=7))
    drain(scheduler)
    scheduler.add(Request(1, [*range(10, 16), 1, 1, 1, 1, 1, 1, 1, 50], max_tokens=1))
    assert step(scheduler).chunks[0].start == 12


def test_full_pool_preempts_the_youngest_and_its_output_stays() -> None:
    scheduler = make(blocks=6, block_size=2, running=4)
    requests = [Request(i, [10 * i + 1, 10 * i + 2, 10 * i + 3], max_tokens=8) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    plans = drain(scheduler)
    assert scheduler.stats().preemptions >= 1
    assert [len(request.output_tokens) for request in requests] == [8, 8]
    assert all(0 in ids(plan) for plan in plans[: ids_until(plans, 0)]), "the oldest never waits"
    repeated = [c for plan in plans for c in plan.chunks if not c.decodes and c.start + len(c.tokens) > 3]
    assert {chunk.request.id for chunk in repeated} == {1}


@given(ends=st.lists(st.sampled_from(["length", "stop", "abort"]), max_size=8))
def test_each_request_counts_once_as_what_ended_it(ends: list[str]) -> None:
    """The sampled token is always 1."""
    scheduler = make()
    for i, end in enumerate(ends):
        stops = frozenset({1}) if end == "stop" else frozenset[int]()
        scheduler.add(Request(i, [i, 0], max_tokens=2, stop_token_ids=stops))
        if end == "abort":
            assert scheduler.abort(i)
    drain(scheduler)
    stats = scheduler.stats()
    counted = (stats.finished_length, stats.finished_stop, stats.aborted)
    assert counted == tuple(map(ends.count, ("length", "stop", "abort")))


def test_who_is_overtaken_is_told_by_age_and_not_by_the_order_of_admission() -> None:
    """In the first step, the third request and then the first are admitted. Only the third overtakes the second,
    because the first is older."""
    scheduler = make(running=2, overtakes=1)
    for i, tokens in enumerate((2, 30, 1)):
        scheduler.add(Request(i, list(range(100 * i, 100 * i + tokens)), max_tokens=1))
    assert ids(step(scheduler)) == [2, 0]
    for i in (3, 4):
        scheduler.add(Request(i, [100 * i], max_tokens=1))
    assert ids(step(scheduler))[0] == 1


def test_a_preempted_request_goes_before_one_that_never_ran() -> None:
    """The request that never ran has less to compute, so otherwise it would go first."""
    scheduler = make(blocks=6, block_size=2, running=2)
    for i in range(2):
        scheduler.add(Request(i, [10 * i + 1, 10 * i + 2, 10 * i + 3], max_tokens=8))
    step(scheduler)
    scheduler.add(Request(2, [99], max_tokens=1))
    plans = drain(scheduler)
    assert scheduler.stats().preemptions >= 1
    begins = next(i for i, plan in enumerate(plans) if 2 in ids(plan))
    back = next(i for i, plan in enumerate(plans) if any(c.request.id == 1 and not c.decodes for c in plan.chunks))
    assert back <= begins


def ids_until(plans: list[StepPlan], request_id: int) -> int:
    return max(i for i, plan in enumerate(plans) if request_id in ids(plan))


def test_no_request_is_admitted_into_the_growth_of_those_that_run() -> None:
    scheduler = make(blocks=4, block_size=4)
    scheduler.add(Request(0, list(range(8)), max_tokens=8))
    step(scheduler)
    scheduler.add(Request(1, [50, 51, 52], max_tokens=2))
    assert ids(step(scheduler)) == [0], "one block is free, and the running request will need it"
    drain(scheduler)
    assert scheduler.stats().preemptions == 0


@settings(deadline=None, max_examples=60)
@given(
    hot_per_step=st.integers(1, 6),
    overtakes=st.integers(0, 6),
    running=st.integers(1, 6),
    blocks=st.integers(16, 40),
    step_tokens=st.integers(8, 40),
)
def test_a_cold_request_is_not_starved_by_a_stream_of_hot_ones(
    hot_per_step: int, overtakes: int, running: int, blocks: int, step_tokens: int
) -> None:
    """Younger requests with less to compute keep coming; the cold one needs most of the pool."""
    scheduler = make(blocks=blocks, step_tokens=step_tokens, running=running, waiting=500, overtakes=overtakes)
    scheduler.add(Request(0, list(range(8)), max_tokens=2))
    drain(scheduler)
    scheduler.add(Request(1, list(range(100, 160)), max_tokens=2))
    next_id = 2
    for _ in range(400):
        for _ in range(min(hot_per_step, 500 - scheduler.load().waiting)):
            scheduler.add(Request(next_id, [*range(8), next_id], max_tokens=3))
            next_id += 1
        plan = step(scheduler)
        if 1 in ids(plan):
            break
    older_or_overtaking = sum(c.request.id > 1 and not c.decodes for c in plan.chunks)
    assert 1 in ids(plan), "starved"
    admitted = scheduler.stats().prompt_tokens_queried - 8 - 60
    assert admitted / 9 <= overtakes + running + older_or_overtaking


def test_least_left_to_compute_goes_first() -> None:
    scheduler = make(step_tokens=8, running=2)
    scheduler.add(Request(0, list(range(8)), max_tokens=1))
    drain(scheduler)
    scheduler.add(Request(1, list(range(50, 60)), max_tokens=1))
    scheduler.add(Request(2, [*range(8), 9], max_tokens=1))
    assert ids(step(scheduler)) == [2, 1]


def test_stop_token_ends_a_request_and_is_reported() -> None:
    scheduler = make()
    scheduler.add(Request(0, [1], max_tokens=9, stop_token_ids=frozenset({7})))
    plan = scheduler.schedule()
    assert plan is not None
    [output] = finish_step(scheduler, plan, token=7)
    assert (output.token, output.finish) == (SampledToken(7), FinishReason.STOP)
    assert not scheduler.has_work


def test_abort_during_a_step_frees_blocks_at_its_end() -> None:
    scheduler = make()
    scheduler.add(Request(0, list(range(10)), max_tokens=9))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.abort(0)
    assert scheduler.load().blocks_free == 97
    assert finish_step(scheduler, plan) == []
    assert scheduler.load().blocks_free == 100
    assert not scheduler.abort(0)
    assert scheduler.stats().aborted == 1


def test_id_of_an_aborted_request_may_be_used_again_at_once() -> None:
    scheduler = make()
    scheduler.add(Request(0, [1, 2, 3], max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort(0)
    successor = Request(0, [4, 5, 6], max_tokens=2)
    scheduler.add(successor)
    assert finish_step(scheduler, plan) == []
    assert successor.output_tokens == []


def test_failed_step_drops_its_requests_and_the_rest_goes_on() -> None:
    scheduler = make(step_tokens=8)
    scheduler.add(Request(0, list(range(8)), max_tokens=2))
    scheduler.add(Request(1, list(range(20, 28)), max_tokens=2))
    assert scheduler.schedule()
    assert scheduler.fail_step() == [0]
    assert scheduler.load().blocks_free == 100
    assert {1} == {i for plan in drain(scheduler) for i in ids(plan)}
    assert (scheduler.stats().failed_steps, scheduler.stats().failed) == (1, 1)


def test_result_without_a_token_leaves_the_step_to_be_failed() -> None:
    scheduler = make()
    scheduler.add(Request(0, [1, 2], max_tokens=2))
    assert scheduler.schedule()
    with pytest.raises(KeyError):
        scheduler.complete(StepResult())
    assert scheduler.fail_step() == [0]


def test_reset_during_a_step_keeps_what_it_computes_out_of_the_cache() -> None:
    scheduler = make()
    scheduler.add(Request(0, list(range(10)), max_tokens=3))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.reset_cache() == 0
    finish_step(scheduler, plan)
    drain(scheduler)
    scheduler.add(Request(1, list(range(10)), max_tokens=1))
    assert step(scheduler).chunks[0].start == 0


def test_one_request_whose_duplicates_fill_the_pool_goes_on() -> None:
    """The last prompt block is cached already and computed again. Keeping both needs five blocks; there are four."""
    scheduler = make(blocks=4, block_size=2)
    scheduler.add(Request(0, [1, 2, 3, 4], max_tokens=1))
    drain(scheduler)
    request = Request(1, [1, 2, 3, 4], max_tokens=5)
    scheduler.add(request)
    drain(scheduler)
    assert len(request.output_tokens) == 5
    assert scheduler.stats().preemptions == 1


def test_steps_begin_and_end_in_turn() -> None:
    scheduler = make()
    assert scheduler.schedule() is None
    with pytest.raises(RuntimeError, match="no step"):
        scheduler.complete(StepResult())
    with pytest.raises(RuntimeError, match="no step"):
        scheduler.fail_step()
    scheduler.add(Request(0, [1], max_tokens=1))
    assert scheduler.schedule()
    with pytest.raises(RuntimeError, match="in progress"):
        scheduler.schedule()


def test_what_can_never_run_is_refused_when_added() -> None:
    scheduler = make(blocks=4, block_size=4, waiting=1)
    scheduler.add(Request(0, [1] * 10, max_tokens=7))
    with pytest.raises(QueueFull):
        scheduler.add(Request(1, [1], max_tokens=1))
    drain(scheduler)
    with pytest.raises(ValueError, match="need 5 KV blocks"):
        scheduler.add(Request(1, [1] * 10, max_tokens=8))
    with pytest.raises(ValueError, match="at least one token"):
        scheduler.add(Request(1, [], max_tokens=1))
    scheduler.add(Request(1, [1], max_tokens=2))
    step(scheduler)
    with pytest.raises(ValueError, match="id 1 is in use"):
        scheduler.add(Request(1, [1], max_tokens=1))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0, 1, 1), "max_step_tokens"),
        ((8, 0, 1), "max_running"),
        ((8, 1, 0), "max_waiting"),
        ((8, 9, 1), "max_running"),
    ],
)
def test_config_names_the_field_at_fault(values: tuple[int, int, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(*values)


def test_negative_overtakes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_overtakes"):
        SchedulerConfig(8, 1, 1, max_overtakes=-1)


def test_load_counts_what_is_left_to_compute() -> None:
    scheduler = make(step_tokens=16, running=2)
    scheduler.add(Request(0, list(range(6)), max_tokens=20))
    step(scheduler)
    scheduler.add(Request(1, list(range(100, 120)), max_tokens=20))
    step(scheduler)
    scheduler.add(Request(2, [*range(100, 108), 1, 2], max_tokens=20))
    assert scheduler.load() == LoadReport(
        running=2,
        waiting=1,
        uncached_tokens=(20 - 12) + (10 - 8),
        decoding=1,
        context_tokens=6 + 2,
        blocks_free=100 - 2 - 5,
        blocks_total=100,
        block_size=4,
        cost=StepCost(),
    )


def test_keys_are_held_once_their_blocks_are_computed() -> None:
    scheduler = make(step_tokens=8)
    spans = tuple(KeySpan(PrefixKey(i), 4 * i) for i in (1, 2, 3))
    scheduler.add(Request(0, list(range(13)), max_tokens=1, key_spans=spans))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.take_changes().stored == ()
    finish_step(scheduler, plan)
    assert scheduler.take_changes().stored == ((1, Tier.GPU), (2, Tier.GPU))
    drain(scheduler)
    assert scheduler.held_keys() == ((1, 2, 3), (), ())


def test_a_request_aborted_in_its_first_step_copies_to_the_end() -> None:
    """It reuses the first rows of a block, which that step copies. Nobody else gets the block before the step ends."""
    cache = PrefixCache(8, 2, index=IndexKind.RADIX)
    scheduler = Scheduler(cache, SchedulerConfig(max_step_tokens=8, max_running=2, max_waiting=4))
    backend = CheckingBackend(cache, 8)
    scheduler.add(Request(1, [1, 2, 3, 4, 1], 1))
    while (plan := scheduler.schedule()) is not None:
        scheduler.complete(backend.run(plan))
    scheduler.add(Request(2, [1, 2, 3, 1, 1], 1))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.chunks[0].source is not None
    result, available = backend.run(plan), cache.pool.available
    assert scheduler.abort(2)
    assert cache.pool.available == available
    scheduler.complete(result)
    assert cache.pool.available == cache.pool.total
    check_integrity(cache)
