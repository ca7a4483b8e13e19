"""Pins that nobody asked for keep conversations while their tool runs, and prefixes before a branch."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.prefix_cache import PrefixCache
from engine.sched.pauses import (
    FIRST_PAUSE_S,
    LEAST_SHARE,
    MARGIN,
    MOST_PAUSE_S,
    WAITED_S,
    ToolPauses,
)
from engine.sched.plan import SampledToken, StepResult
from engine.sched.request import CacheMark, Request, ToolUse
from engine.sched.retention import BRANCH_S
from engine.sched.scheduler import Scheduler, SchedulerConfig
from tests.engine.cache.integrity import check_integrity

BLOCK = 4
CALLS, GOES_ON = ToolUse(may_be_called=True, brings_result=False), ToolUse(may_be_called=True, brings_result=True)


class Served:
    """An engine in virtual time, whose answers are all the token 1."""

    def __init__(self, blocks: int = 40, share: float = 0.5, least: int = 1, pinned: int = 0) -> None:
        self.cache = PrefixCache(blocks, BLOCK, learnt_blocks=int(share * blocks), pinned_blocks=pinned)
        self.scheduler = Scheduler(self.cache, SchedulerConfig(256, 8, 50, least_kept_tokens=least))
        self.now_s = 0.0
        self.ids = count()

    def add(self, prompt: list[int], max_tokens: int = 4, tools: ToolUse | None = None, mark_s: float = 0.0) -> Request:
        marks = (CacheMark(len(prompt), mark_s),) if mark_s else ()
        request = Request(next(self.ids), prompt, max_tokens, tools=tools, marks=marks)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        self.scheduler.advance(self.now_s)
        plan = self.scheduler.schedule()
        assert plan is not None
        sampled = {chunk.request.id: SampledToken(1) for chunk in plan.chunks if chunk.samples}
        self.scheduler.complete(StepResult(sampled, 0.01))
        check_integrity(self.cache)

    def answer(self, prompt: list[int], tools: ToolUse | None = None, max_tokens: int = 4) -> list[int]:
        """Answer the prompt and return the conversation so far."""
        request = self.add(prompt, max_tokens, tools)
        while self.scheduler.has_work:
            self.step()
        return [*prompt, *request.output_tokens]

    def flood(self) -> None:
        for _ in range(2 * self.cache.pool.total // 10):
            fresh = 1000 * next(self.ids)
            self.answer(list(range(fresh, fresh + 36)))

    def held(self, prompt: list[int]) -> int:
        return self.cache.count_hits(self.cache.open(prompt), len(prompt))


def test_a_conversation_outlives_a_flood_while_its_tool_runs_and_no_longer() -> None:
    served = Served()
    calling, other = served.answer(list(range(100, 116)), CALLS), served.answer(list(range(200, 216)))
    served.now_s = FIRST_PAUSE_S - 1
    served.flood()
    assert (served.held([*calling, 5]), served.held([*other, 5])) == (16, 0)
    served.now_s = FIRST_PAUSE_S
    served.flood()
    assert served.held([*calling, 5]) == 0


def test_a_next_turn_releases_what_was_kept_and_teaches_the_pause() -> None:
    served = Served(blocks=80)
    talk = served.answer(list(range(100, 112)), CALLS)
    for _ in range(9):
        served.now_s += 2.0
        assert len(served.cache.learnt) == len(talk) // BLOCK - 1  # the last token's KV is not computed
        talk = served.answer([*talk, *range(4)], GOES_ON)
    served.now_s += MARGIN * 2.0 - 0.1
    served.flood()
    assert len(served.cache.learnt) == len(talk) // BLOCK - 1
    served.now_s += 0.2
    served.scheduler.advance(served.now_s)
    assert len(served.cache.learnt) == 0


def test_answers_that_no_result_follows_on_keep_nothing_until_results_follow_again() -> None:
    served = Served(blocks=200)
    talk: list[int] = []
    for i in range(40):
        talk = served.answer(list(range(1000 * i, 1000 * i + 12)), CALLS)
        talk = served.answer([*talk, 7, 7, 7, 7], CALLS)  # another question, so no tool ran
    served.now_s += MOST_PAUSE_S
    served.scheduler.advance(served.now_s)
    served.answer(list(range(50_000, 50_012)), CALLS)
    assert len(served.cache.learnt) == 0
    for _ in range(40):
        talk = served.answer([*talk, 7, 7, 7, 7], GOES_ON)
    assert len(served.cache.learnt) > 0


def test_a_regenerated_answer_keeps_what_is_before_the_branch() -> None:
    served = Served()
    prompt = list(range(100, 117))
    first = served.answer(prompt, max_tokens=8)
    served.answer([*first, 3, 3, 3, 3])
    assert len(served.cache.learnt) == 0, "a conversation that goes on is no branch"
    served.answer(prompt, max_tokens=8)
    assert len(served.cache.learnt) == 4
    served.now_s = BRANCH_S - 1
    served.flood()
    assert served.held(prompt) == 16
    served.now_s = BRANCH_S
    served.flood()
    assert served.held(prompt) == 0


def test_what_many_have_in_common_is_not_kept_for_a_branch() -> None:
    served = Served(blocks=400)
    shared = list(range(16))
    for i in range(30):
        served.answer([*shared, *range(100 * i + 100, 100 * i + 108)])
    served.now_s = BRANCH_S
    served.scheduler.advance(served.now_s)
    served.answer([*shared, *range(9000, 9008)])
    assert len(served.cache.learnt) == 0


@pytest.mark.parametrize(("least", "kept"), [(16, 4), (17, 0)])
def test_short_beginnings_are_not_kept(least: int, kept: int) -> None:
    served = Served(least=least)
    served.answer(list(range(100, 116)), CALLS, max_tokens=1)
    assert len(served.cache.learnt) == kept


def test_running_requests_and_those_that_wait_get_what_nobody_asked_for() -> None:
    """No request is preempted or waits for the sake of unasked pins, and pins that were asked for stay."""
    served = Served(blocks=40, share=0.9, pinned=8)
    served.add(list(range(500, 532)), 1, mark_s=1000.0)
    served.step()
    for i in range(3):
        served.answer(list(range(100 * i, 100 * i + 40)), CALLS, max_tokens=1)
    assert (len(served.cache.pins), len(served.cache.learnt)) == (8, 30)
    assert served.scheduler.load().blocks_free == 32
    running = served.add(list(range(2000, 2040)), 40)
    served.step()
    waiting = served.add(list(range(3000, 3020)), 12)
    while served.scheduler.has_work:
        served.step()
    assert (len(running.output_tokens), len(waiting.output_tokens)) == (40, 12)
    assert served.scheduler.stats().preemptions == 0
    assert served.cache.learnt.given_up > 0
    assert served.held(list(range(500, 533))) == 32
    assert served.cache.pins.given_up == 0


def test_the_time_that_a_client_asks_for_runs_from_the_end_of_its_prompt() -> None:
    """A long answer does not prolong the pin: here it takes 6 of the 10 seconds."""
    served = Served(pinned=8)
    served.add(list(range(100, 116)), 6, mark_s=10.0)
    while served.scheduler.has_work:
        served.step()
        served.now_s += 1.0
    assert served.now_s == 6.0
    for now_s, pinned in ((9.9, 4), (10.0, 0)):
        served.scheduler.advance(now_s)
        assert len(served.cache.pins) == pinned


def test_a_request_that_nothing_else_runs_beside_begins_in_the_step_that_ends_the_pins() -> None:
    served = Served(blocks=10, pinned=8)
    served.add([7] * 32, mark_s=50.0)
    while served.scheduler.has_work:
        served.step()
    assert len(served.cache.pins) == 8
    large = served.add([9] * 32)
    served.step()  # `Served.step` asserts that there is a step
    assert large.output_tokens
    assert len(served.cache.pins) < 8


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_a_client_asks_for_outlasts_blocks_that_a_step_in_progress_gives_back(is_aborted: bool) -> None:
    served = Served(blocks=10, share=0.0, pinned=4)
    served.add([7] * 16, 1, mark_s=50.0)
    served.step()
    first, scheduler = served.add([8] * 20, 8), served.scheduler
    first.stop_token_ids = frozenset([1])
    assert scheduler.schedule() is not None
    assert scheduler.schedule_ahead() is not None
    served.add([9] * 16, 4)
    if is_aborted:
        scheduler.abort(first.id)
    scheduler.complete(StepResult({first.id: SampledToken(1)}, 0.01))
    assert scheduler.schedule_ahead() is None, "the step in progress still uses the ended request's blocks"
    scheduler.complete(StepResult({first.id: SampledToken(1)}, 0.01))
    while scheduler.has_work:
        served.step()
    assert (len(served.cache.pins), served.cache.pins.given_up) == (4, 0)


def test_a_request_that_does_not_fit_all_the_same_ends_no_pin() -> None:
    served = Served(blocks=40, share=0.5)
    running = served.add(list(range(2000, 2080)), 8)
    served.step()
    served.cache.learnt.clear()
    talk = served.add(list(range(100, 116)), 1, CALLS)
    served.step()
    assert talk.output_tokens
    assert len(served.cache.learnt) == 4
    served.add(list(range(3000, 3120)), 1)
    served.step()
    assert len(served.cache.learnt) == 4, "whichever pins end, the large request has to wait for the running one"
    while served.scheduler.has_work:
        served.step()
    assert len(running.output_tokens) == 8


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 700), st.booleans(), st.booleans()), max_size=60))
def test_what_is_learnt_is_bounded_and_outlasts_most_pauses(talks: list[tuple[float, bool, bool]]) -> None:
    pauses, now_s = ToolPauses(), 0.0
    seen: list[float] = []
    for i, (pause_s, goes_on, with_result) in enumerate(talks):
        pauses.ended(f"{i}".encode(), now_s)
        now_s += pause_s
        if goes_on:
            pauses.goes_on(f"{i}".encode(), now_s, with_result=with_result)
            seen += [pause_s] if with_result else []
        assert pauses.lifetime_s <= max(MOST_PAUSE_S, FIRST_PAUSE_S)
        assert pauses.is_awaited(f"{i}".encode()) is not goes_on
    if not pauses.lifetime_s:
        assert len(seen) < len(talks)
    elif len(seen) >= 8:
        covered = sum(pause_s <= pauses.lifetime_s for pause_s in seen)
        assert covered >= 0.9 * len(seen) - 1 or pauses.lifetime_s == MOST_PAUSE_S


def test_conversations_that_never_go_on_are_forgotten() -> None:
    pauses = ToolPauses()
    for i in range(10_000):
        pauses.ended(f"{i}".encode(), i * 0.01)
    assert sum(pauses.is_awaited(f"{i}".encode()) for i in range(10_000)) <= 4096
    assert pauses.lifetime_s == 0.0
    pauses.ended(b"last", 1000.0 + WAITED_S)
    assert not pauses.is_awaited(b"9999")
    assert LEAST_SHARE > 0
