"""What the scheduler promises while a step is ahead of the one in progress, one promise per test.

Each number is that of another engine's bug report. The test would have caught that bug.
"""

from __future__ import annotations

import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.contract.events import Tier
from engine.contract.keys import PrefixKey
from engine.sched.plan import PENDING, SampledToken, StepPlan, StepResult
from engine.sched.request import FinishReason, KeySpan, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig, TokenOutput
from tests.engine.cache.integrity import check_integrity

STOP = 7


def make(blocks: int = 100, block_size: int = 4, step_tokens: int = 64, running: int = 8) -> Scheduler:
    return Scheduler(PrefixCache(blocks, block_size), SchedulerConfig(step_tokens, running, max_waiting=50))


def begin(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def begin_ahead(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule_ahead()
    assert plan is not None
    return plan


def end(scheduler: Scheduler, plan: StepPlan, **tokens: int) -> list[TokenOutput]:
    """End the oldest step, which is `plan`. Request N samples the token `tN` if that is given, else the token 1."""
    sampled = {c.request.id: SampledToken(tokens.get(f"t{c.request.id}", 1)) for c in plan.chunks if c.samples}
    return scheduler.complete(StepResult(sampled, elapsed_s=0.01))


def ids(plan: StepPlan) -> list[int]:
    return [chunk.request.id for chunk in plan.chunks]


def is_whole(scheduler: Scheduler) -> bool:
    check_integrity(scheduler._cache)
    return scheduler._cache.pool.available == scheduler._cache.pool.total and not scheduler.has_work


def test_a_token_on_its_way_is_pending_and_its_place_is_known() -> None:
    scheduler = make()
    request = Request(1, [5, 6, 7], max_tokens=9)
    scheduler.add(request)
    first, second = begin(scheduler), begin_ahead(scheduler)
    end(scheduler, first, t1=40)
    third = begin_ahead(scheduler)
    chunks = [plan.chunks[0] for plan in (first, second, third)]
    assert [(c.start, c.tokens, c.decodes) for c in chunks] == [
        (0, (5, 6, 7), False),
        (3, (PENDING,), True),
        (4, (PENDING,), True),
    ]
    assert [c.output_index for c in chunks] == [0, 1, 2]
    assert [len(c.blocks) for c in chunks] == [1, 1, 2]
    end(scheduler, second, t1=41)
    assert request.output_tokens == [40, 41]


def test_no_token_is_computed_beyond_the_last() -> None:
    scheduler = make()
    scheduler.add(Request(1, [5, 6, 7], max_tokens=2))
    first, second = begin(scheduler), begin_ahead(scheduler)
    end(scheduler, first)
    assert scheduler.schedule_ahead() is None
    [output] = end(scheduler, second)
    assert output.finish is FinishReason.LENGTH
    assert is_whole(scheduler)


def test_blocks_of_a_request_found_to_have_stopped_stay_until_the_step_ahead_has_ended() -> None:
    """vLLM #45357: blocks were given to another request at once, and the step in flight wrote them."""
    scheduler = make(blocks=4)
    scheduler.add(Request(1, [1] * 7, max_tokens=9, stop_token_ids=frozenset({STOP})))
    first, second = begin(scheduler), begin_ahead(scheduler)
    written = set(second.chunks[0].blocks)
    [output] = end(scheduler, first, t1=STOP)
    assert output.finish is FinishReason.STOP
    scheduler.add(Request(2, [2] * 12, max_tokens=1))
    assert scheduler.schedule_ahead() is None, "two blocks are free, and request 2 needs three"
    assert scheduler.load().blocks_free == 2
    assert end(scheduler, second) == [], "the token after the last belongs to no request"
    assert scheduler.load().blocks_free == 4
    third = begin(scheduler)
    assert ids(third) == [2]
    assert written & set(third.chunks[0].blocks)


def test_nothing_released_in_a_step_waits_for_a_step_begun_after_it() -> None:
    scheduler = make()
    scheduler.add(Request(1, [1] * 7, max_tokens=9))
    scheduler.add(Request(2, [2] * 7, max_tokens=9))
    first = begin(scheduler)
    scheduler.abort(1)
    second = begin_ahead(scheduler)
    assert ids(second) == [2]
    end(scheduler, first)
    assert scheduler.load().blocks_free == 98


def test_a_request_that_ends_twice_gives_its_blocks_back_once() -> None:
    """mini-sglang guards against this with a set of finished requests."""
    scheduler = make()
    scheduler.add(Request(1, [1] * 7, max_tokens=9, stop_token_ids=frozenset({STOP})))
    first, second = begin(scheduler), begin_ahead(scheduler)
    end(scheduler, first, t1=STOP)
    assert not scheduler.abort(1)
    assert end(scheduler, second, t1=STOP) == []
    assert scheduler.stats().finished_stop == 1
    assert is_whole(scheduler)


def test_an_abort_after_the_last_prefill_chunk_has_begun_shows_no_token() -> None:
    """SGLang #34149: the sampled token was still handed out."""
    scheduler = make(step_tokens=8)
    request = Request(1, [1] * 16, max_tokens=9)
    scheduler.add(request)
    first, second = begin(scheduler), begin_ahead(scheduler)
    assert second.chunks[0].samples
    end(scheduler, first)
    third = begin_ahead(scheduler)
    assert scheduler.abort(1)
    assert end(scheduler, second) == end(scheduler, third) == []
    assert request.output_tokens == []
    assert is_whole(scheduler)


def test_chunks_of_one_prefill_follow_each_other_and_only_the_last_is_decoded_from() -> None:
    """mini-sglang ef4367f: a chunk that does not end its prefill left a made-up token to decode."""
    scheduler = make(step_tokens=8)
    scheduler.add(Request(1, list(range(100, 120)), max_tokens=9))
    first, second = begin(scheduler), begin_ahead(scheduler)
    end(scheduler, first)
    third = begin_ahead(scheduler)
    end(scheduler, second)
    fourth = begin_ahead(scheduler)
    chunks = [plan.chunks[0] for plan in (first, second, third, fourth)]
    assert [token for c in chunks[:3] for token in c.tokens] == list(range(100, 120))
    assert [(c.start, c.samples, c.decodes) for c in chunks] == [
        (0, False, False),
        (8, False, False),
        (16, True, False),
        (20, True, True),
    ]
    assert chunks[3].tokens == (PENDING,)


def test_a_block_is_cached_when_the_step_that_wrote_it_has_ended_not_when_it_was_planned() -> None:
    """vLLM #47653, #47728: planned blocks counted as computed."""
    scheduler = make(step_tokens=8)
    spans = tuple(KeySpan(PrefixKey(i), 8 * i) for i in (1, 2))
    scheduler.add(Request(1, list(range(17)), max_tokens=3, key_spans=spans))
    first, second = begin(scheduler), begin_ahead(scheduler)
    assert scheduler.take_changes().stored == ()
    end(scheduler, first)
    assert scheduler.take_changes().stored == ((1, Tier.GPU),)
    third = begin_ahead(scheduler)
    end(scheduler, second)
    assert scheduler.take_changes().stored == ((2, Tier.GPU),)
    end(scheduler, third)


def test_an_equal_prompt_in_flight_is_neither_computed_again_nor_read_too_early() -> None:
    """mini-sglang: two equal prompts in one batch read blocks that were free."""
    scheduler = make(step_tokens=8)
    for number in (1, 2):
        scheduler.add(Request(number, list(range(17)), max_tokens=1))
    first, second = begin(scheduler), begin_ahead(scheduler)
    assert ids(first) == ids(second) == [1]
    end(scheduler, first)
    third = begin_ahead(scheduler)
    assert ids(third) == [1], "the second half of the prompt is on its way"
    end(scheduler, second)
    fourth = begin_ahead(scheduler)
    assert [(c.request.id, c.start, len(c.tokens)) for c in fourth.chunks] == [(2, 16, 1)]
    assert fourth.chunks[0].blocks[:4] == second.chunks[0].blocks
    end(scheduler, third)
    end(scheduler, fourth)
    assert is_whole(scheduler)


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    """vLLM #49675: preempted blocks stayed fenced, so one request after the other was preempted without making room.

    vLLM #38624: a token on its way to a preempted request was appended a second time.
    """
    scheduler = make(blocks=6, block_size=2)
    requests = [Request(i, [10 * i, 10 * i + 1], max_tokens=6) for i in (1, 2)]
    for request in requests:
        scheduler.add(request)
    plans: list[StepPlan] = []
    while scheduler.has_work:
        plans = plans or [begin(scheduler)]
        before = scheduler.stats().preemptions
        ahead = scheduler.schedule_ahead()
        assert scheduler.stats().preemptions == before
        plans += [ahead] if ahead else []
        tokens = {f"t{request.id}": 100 * request.id + len(request.output_tokens) for request in requests}
        end(scheduler, plans.pop(0), **tokens)
    assert scheduler.stats().preemptions == 1
    assert [request.output_tokens for request in requests] == [[100 * i + n for n in range(6)] for i in (1, 2)]
    assert is_whole(scheduler)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=-0.5),
    ],
)
def test_a_token_that_depends_on_all_before_it_is_not_chosen_ahead(sampling: SamplingParams) -> None:
    scheduler = make()
    scheduler.add(Request(1, [1, 2, 3], max_tokens=9, sampling=sampling))
    scheduler.add(Request(2, [4, 5, 6], max_tokens=9))
    first, second = begin(scheduler), begin_ahead(scheduler)
    assert (ids(first), ids(second)) == ([1, 2], [2])
    end(scheduler, first, t1=50)
    third = begin_ahead(scheduler)
    assert [(c.request.id, c.tokens) for c in third.chunks] == [(1, (50,)), (2, (PENDING,))]


def test_other_sampling_is_chosen_ahead() -> None:
    scheduler = make()
    sampling = SamplingParams(top_p=0.5, top_k=3, min_p=0.1, logit_bias={4: 1.0}, seed=3, logprobs=2)
    scheduler.add(Request(1, [1, 2, 3], max_tokens=9, sampling=sampling))
    begin(scheduler)
    assert begin_ahead(scheduler).chunks[0].tokens == (PENDING,)


def test_a_failure_takes_the_requests_of_both_steps_and_leaves_the_rest() -> None:
    scheduler = make(step_tokens=8)
    for number in (1, 2, 3):
        scheduler.add(Request(number, [number] * 8, max_tokens=1))
    assert (ids(begin(scheduler)), ids(begin_ahead(scheduler))) == ([1], [2])
    assert scheduler.fail_step() == [1, 2]
    assert scheduler.load().blocks_free == 100
    assert (scheduler.stats().failed_steps, scheduler.stats().failed) == (2, 2)
    last = begin(scheduler)
    assert ids(last) == [3]
    end(scheduler, last)
    assert is_whole(scheduler)


def test_a_result_without_its_token_leaves_both_steps_to_be_failed() -> None:
    scheduler = make()
    scheduler.add(Request(1, [1, 2, 3], max_tokens=9))
    begin(scheduler)
    begin_ahead(scheduler)
    with pytest.raises(KeyError):
        scheduler.complete(StepResult())
    assert scheduler.fail_step() == [1]
    assert is_whole(scheduler)


def test_a_cache_reset_in_flight_loses_no_token_and_keeps_no_block() -> None:
    """vLLM #42117: a token was dropped after the cache was cleared."""
    scheduler = make(block_size=2)
    request = Request(1, [1, 2, 3, 4, 5], max_tokens=5)
    scheduler.add(request)
    plans = [begin(scheduler), begin_ahead(scheduler)]
    scheduler.reset_cache()
    for number in range(5):
        end(scheduler, plans.pop(0), t1=100 + number)
        if plans and (ahead := scheduler.schedule_ahead()):
            plans.append(ahead)
    assert request.output_tokens == [100, 101, 102, 103, 104]
    assert is_whole(scheduler)
    assert scheduler._cache.pool.idle_blocks() == ()


def test_waiting_requests_join_the_step_ahead() -> None:
    scheduler = make()
    scheduler.add(Request(1, [1, 2, 3], max_tokens=9))
    begin(scheduler)
    scheduler.add(Request(2, [4, 5], max_tokens=9))
    assert [(c.request.id, c.tokens) for c in begin_ahead(scheduler).chunks] == [(1, (PENDING,)), (2, (4, 5))]


def test_exactly_one_step_goes_before_a_step_ahead() -> None:
    scheduler = make()
    with pytest.raises(RuntimeError, match="in progress"):
        scheduler.schedule_ahead()
    scheduler.add(Request(1, [1, 2, 3], max_tokens=9))
    first = begin(scheduler)
    begin_ahead(scheduler)
    with pytest.raises(RuntimeError, match="in progress"):
        scheduler.schedule_ahead()
    with pytest.raises(RuntimeError, match="in progress"):
        scheduler.schedule()
    end(scheduler, first)
    assert end(scheduler, first)
