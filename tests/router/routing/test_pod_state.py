"""What the gateway learns about a pod."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import LoadReport, StepCost
from router.views.latency import PRIOR
from router.views.pod_state import PodState
from router.views.reported import FRESH_S, STALE_S
from router.views.types import PodId
from tests.router.routing.pods import Made, seen_of

COST = StepCost(base_s=0.005, token_s=1e-4)


def send(state: PodState, name: str, tokens: int, now_s: float, **options: bool) -> None:
    state.sent(name, prompt_tokens=tokens, uncached_tokens=tokens, output_tokens=100, now_s=now_s, **options)


def reporting() -> PodState:
    state = PodState()
    state.report(LoadReport(cost=COST), now_s=0.0)
    return state


def test_queued_prefill_grows_by_what_is_sent_and_drains_with_the_clock() -> None:
    state = reporting()
    send(state, "a", 1000, 1.0)
    assert seen_of(state, 1.0).free_at_s == pytest.approx(1.105)
    send(state, "b", 1000, 1.0)
    assert seen_of(state, 1.05).free_at_s == pytest.approx(1.21)
    assert seen_of(state, 1.05).uncached_tokens == 2000


def test_a_first_token_says_what_is_left() -> None:
    state = reporting()
    send(state, "a", 1000, 1.0)
    send(state, "b", 2000, 1.0)
    state.first_token("a", now_s=1.5)
    seen = seen_of(state, 1.5)
    assert seen.free_at_s == pytest.approx(1.705)
    assert (seen.in_flight, seen.decoding, seen.uncached_tokens, seen.context_tokens) == (2, 1, 2000, 1050)


def test_a_withdrawn_request_frees_its_place_in_the_queue() -> None:
    state = reporting()
    send(state, "a", 1000, 1.0)
    send(state, "b", 2000, 1.0)
    before_s = seen_of(state, 1.0).free_at_s
    state.finished("b", now_s=1.0)
    assert seen_of(state, 1.0).free_at_s == pytest.approx(before_s - 0.2)
    assert seen_of(state, 1.0).uncached_tokens == 1000


def test_a_pod_that_hangs_looks_ever_worse() -> None:
    state = reporting()
    send(state, "a", 1000, 1.0)
    waits = [seen_of(state, now_s).free_at_s - now_s for now_s in (1.5, 3.0, 30.0)]
    assert waits == sorted(waits)
    assert waits[-1] > 25


@pytest.mark.parametrize("others", [0, 3])
def test_the_unknown_end_of_a_step_excuses_a_late_first_token_unless_others_send_there(others: int) -> None:
    """When a request comes, half of the running step is predicted to be left, but all of it may be left. If other
    gateways send to the pod, too, their prefill may be the cause of the delay, and the pod is taken as late at once."""
    state = reporting()
    send(state, "a", 1000, 0.9)
    state.first_token("a", now_s=1.0)
    send(state, "b", 1000, 1.5)
    state.report(LoadReport(running=2 + others, uncached_tokens=1000, cost=COST), now_s=1.5)
    due_s = seen_of(state, 1.5).free_at_s
    assert due_s == pytest.approx(1.5 + COST.base_s / 2 + COST.base_s + 0.1)
    soon_s, late_s = due_s + 0.4 * COST.base_s, due_s + 0.6 * COST.base_s
    assert (seen_of(state, soon_s).free_at_s > soon_s) == (others > 0)
    assert seen_of(state, late_s).free_at_s > late_s + COST.base_s


def test_a_pod_that_let_a_request_wait_in_vain_is_not_idle_again_at_once() -> None:
    """The pod is taken as busy for the same time once more, or until a first token comes."""
    state = PodState()
    send(state, "a", 1000, 1.0)
    state.finished("a", now_s=31.0)
    seen = seen_of(state, 31.0)
    assert seen.in_flight == 0
    assert 55 < seen.free_at_s < 61
    send(state, "b", 1000, 32.0)
    assert seen_of(state, 32.0).free_at_s > seen.free_at_s
    state.first_token("b", now_s=32.2)
    assert seen_of(state, 32.2).free_at_s <= 32.2


def test_a_request_that_ends_before_it_is_due_leaves_nothing() -> None:
    state = PodState()
    send(state, "a", 1000, 1.0)
    state.finished("a", now_s=1.05)
    assert seen_of(state, 1.05).free_at_s < 1.05 + 2 * PRIOR.base_s


def test_an_answer_that_does_not_stream_is_not_waited_for() -> None:
    state = reporting()
    send(state, "a", 1000, 1.0, streams=False)
    late = seen_of(state, 5.0)
    assert late.free_at_s < 5.0
    assert (late.in_flight, late.decoding, late.uncached_tokens) == (1, 1, 0)
    state.first_token("a", now_s=9.0)
    state.finished("a", now_s=9.0)
    assert seen_of(state, 9.0).in_flight == 0
    assert seen_of(state, 9.0).context_tokens == 0


def test_answers_that_do_not_stream_leave_no_queue_behind() -> None:
    """Their first token is seen only at their end, which is often long before the predicted end of the prefill."""
    state, now_s = PodState(), 0.0
    for i in range(100):
        send(state, f"{i}", 8000, now_s, streams=False)
        now_s += 0.2
        state.first_token(f"{i}", now_s=now_s)
        state.finished(f"{i}", now_s=now_s)
    assert seen_of(state, now_s).in_flight == 0
    assert seen_of(state, now_s).free_at_s <= now_s + PRIOR.base_s


def test_a_pod_that_prefills_several_at_a_time_looks_no_faster_for_being_busy() -> None:
    """Each first token comes half a second after its request, no matter how many wait."""
    busy, idle = PodState(), PodState()
    for i in range(400):
        at_s = i * 0.05
        if i >= 10:
            busy.first_token(f"{i - 10}", now_s=at_s)
            busy.finished(f"{i - 10}", now_s=at_s)
        send(busy, f"{i}", 500 + i % 7, at_s)
        if i % 20 == 0:
            send(idle, f"{i}", 500 + i % 7, at_s)
        elif i % 20 == 10:
            idle.first_token(f"{i - 10}", now_s=at_s)
            idle.finished(f"{i - 10}", now_s=at_s)
    of_busy, of_idle = (state.cost.base_s + 500 * state.cost.token_s for state in (busy, idle))
    assert of_busy == pytest.approx(of_idle, rel=0.5)


def test_reports_add_what_other_gateways_sent_until_they_are_stale() -> None:
    state = reporting()
    send(state, "mine", 1000, 1.0)
    load = LoadReport(running=4, waiting=3, uncached_tokens=6000, decoding=4, context_tokens=4000, cost=COST)
    state.report(load, now_s=1.05)
    fresh = seen_of(state, 1.05)
    assert (fresh.in_flight, fresh.decoding, fresh.context_tokens) == (7, 4, 4000)
    assert 5000 < fresh.uncached_tokens <= 6000
    assert fresh.free_at_s - 1.05 > 0.5
    state.finished("mine", now_s=1.1)
    stale = seen_of(state, 1.05 + STALE_S)
    assert (stale.in_flight, stale.decoding, stale.uncached_tokens) == (0, 0, 0)


def test_a_row_stands_while_its_report_is_fresh_and_not_beyond() -> None:
    """A row says what is known of a pod. If rows did not last, hundreds of them would be made for every request."""
    state = PodState()
    state.report(LoadReport(running=1, decoding=1, cost=COST), now_s=10.0)
    until_s = state.row(10.0).valid_until_s
    assert 10.0 < until_s < 10.0 + STALE_S
    assert state.row(10.0 + STALE_S / 2).valid_until_s == -math.inf


def test_an_old_report_about_own_requests_invents_no_other_gateway() -> None:
    """The pod may count shared prefixes twice. Since its report, one request has had its first token."""
    state = reporting()
    for name in "abc":
        send(state, name, 1000, 1.0)
    state.first_token("a", now_s=1.1)
    state.report(LoadReport(waiting=3, uncached_tokens=5000, cost=COST), now_s=1.12)
    seen = seen_of(state, 1.12)
    assert seen.in_flight == 3
    assert seen.uncached_tokens == 2000


def test_a_report_of_less_is_believed() -> None:
    state = reporting()
    send(state, "a", 10_000, 1.0)
    state.report(LoadReport(waiting=1, uncached_tokens=1000, cost=COST), now_s=1.5)
    assert seen_of(state, 1.5).free_at_s == pytest.approx(1.6, abs=0.01)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_what_is_queued_takes_as_much_longer_as_a_report_says_that_the_pod_is_slower(factor: float) -> None:
    state = reporting()
    send(state, "a", 1000, 1.0)
    send(state, "b", 2000, 1.0)
    before_s = seen_of(state, 1.0).free_at_s - 1.0
    cost = replace(COST, token_s=factor * COST.token_s)
    state.report(LoadReport(waiting=2, uncached_tokens=3000, cost=cost), now_s=1.0)
    assert seen_of(state, 1.0).free_at_s - 1.0 == pytest.approx(factor * before_s)


@given(own=st.integers(0, 5), waiting=st.integers(0, 9), age_s=st.floats(0, 2 * FRESH_S))
def test_requests_without_a_first_token_are_this_gateways_or_more_if_a_fresh_report_says_so(
    own: int, waiting: int, age_s: float
) -> None:
    state = PodState()
    for number in range(own):
        send(state, f"{number}", 100, 1000.0)
    assert state.waiting(1000.0) == own
    state.report(LoadReport(waiting=waiting), now_s=1000.0)
    for at_s in (0.0, age_s, FRESH_S):
        assert state.waiting(1000.0 + at_s) == (max(own, waiting) if at_s < FRESH_S else own)


def test_a_prefill_of_many_steps_takes_along_what_decodes_in_each() -> None:
    """A step computes 2,048 tokens. After the running step come five more. Each takes 5 ms besides its prefill, and
    10 us for each of the 2,050 tokens in the decoding request's context."""
    state = PodState()
    state.report(LoadReport(cost=replace(COST, context_s=1e-5)), now_s=0.0)
    send(state, "a", 2000, 1.0)
    state.first_token("a", now_s=2.0)
    send(state, "b", 5 * 2048, 2.0)
    assert seen_of(state, 2.0).free_at_s == pytest.approx(2.0 + 5 * 2048e-4 + 6 * (0.005 + 2050e-5))


def test_requests_sent_during_a_step_share_the_next_step() -> None:
    """A step takes 5 ms, and 10 ms more for each request's prefill."""
    state = reporting()
    send(state, "a", 100, 1.0)
    state.first_token("a", now_s=2.0)
    frees_s = []
    for name, sent_s in (("b", 2.001), ("c", 2.002), ("d", 2.006)):
        send(state, name, 100, sent_s)
        frees_s.append(seen_of(state, sent_s).free_at_s)
    # The running step ends at 2.005, the step with b and c at 2.030, and the step with d at 2.045.
    assert frees_s == pytest.approx([2.020, 2.030, 2.045], abs=1e-4)


def test_a_step_that_ends_without_a_first_token_puts_off_what_was_sent_meanwhile() -> None:
    """The running step was predicted to end after 5 ms. An answer that ends after 12 ms shows that it lasted longer."""
    state = reporting()
    for name in "ab":
        send(state, name, 100, 1.0)
        state.first_token(name, now_s=2.0)
    send(state, "c", 100, 2.008)
    state.finished("a", now_s=2.012)
    assert seen_of(state, 2.012).free_at_s == pytest.approx(2.012 + 0.005 + 0.010, abs=1e-4)
    state.finished("b", now_s=2.018)
    assert seen_of(state, 2.018).free_at_s == pytest.approx(2.012 + 0.005 + 0.010, abs=1e-4), "c is in this step"


def test_a_report_takes_no_step_from_what_waits() -> None:
    """A report only counts tokens. It does not shorten the wait for the running step's end and for the next step."""
    state = reporting()
    send(state, "a", 100, 1.0)
    state.first_token("a", now_s=2.0)
    send(state, "b", 100, 2.001)
    before_s = seen_of(state, 2.001).free_at_s
    state.report(LoadReport(running=1, decoding=1, cost=COST), now_s=2.002)
    assert seen_of(state, 2.002).free_at_s == pytest.approx(before_s, abs=2e-3)


def test_kv_use_is_taken_from_the_report() -> None:
    state = PodState()
    state.report(LoadReport(blocks_free=25, blocks_total=100), now_s=0.0)
    assert state.load(1.0).kv_used == pytest.approx(0.75)
    assert state.load(STALE_S).kv_used == 0


@pytest.mark.parametrize("token_s", [1e-5, 5e-4, 5e-3])
def test_the_speed_of_a_pod_that_reports_nothing_is_learnt(token_s: float) -> None:
    state, now_s = PodState(), 0.0
    assert state.cost == PRIOR
    assert seen_of(state, now_s).cost_is_prior
    for i in range(40):
        tokens = 200 + 137 * i % 3000
        state.sent(str(i), prompt_tokens=tokens + 500, uncached_tokens=tokens, output_tokens=10, now_s=now_s)
        now_s += 0.02 + token_s * tokens
        state.first_token(str(i), now_s=now_s, cached_tokens=500)
        state.finished(str(i), now_s=now_s)
    assert state.cost.token_s == pytest.approx(token_s, rel=0.15)
    assert not seen_of(state, now_s).cost_is_prior
    assert seen_of(state, now_s + 1000).cost_is_prior


def test_a_few_answers_do_not_make_a_new_pod_look_slow() -> None:
    """The fit to two answers of a pod of 22 us a token still leans on the prior of 100 us."""
    state, now_s, known = PodState(), 0.0, []
    for i in range(12):
        send(state, str(i), 600, now_s)
        now_s += 0.006 + 22e-6 * 600
        state.first_token(str(i), now_s=now_s)
        state.finished(str(i), now_s=now_s)
        known.append(not seen_of(state, now_s).cost_is_prior)
    assert known == [False] * 9 + [True] * 3


CALLS = st.lists(st.tuples(st.sampled_from(["sent", "first", "finished", "report"]), st.integers(0, 4)), max_size=40)


@given(calls=CALLS)
def test_counts_match_the_open_requests_whatever_is_called(calls: list[tuple[str, int]]) -> None:
    state, now_s = PodState(), 0.0
    waiting: set[int] = set()
    decoding: set[int] = set()
    for call, request in calls:
        now_s += 0.01
        if call == "sent":
            send(state, str(request), 100, now_s)
            waiting.add(request)
            decoding.discard(request)
        elif call == "first":
            state.first_token(str(request), now_s=now_s)
            if request in waiting:
                waiting.remove(request)
                decoding.add(request)
        elif call == "finished":
            state.finished(str(request), now_s=now_s)
            waiting.discard(request)
            decoding.discard(request)
        else:
            state.report(LoadReport(cost=COST), now_s=now_s)
        seen = seen_of(state, now_s)
        assert (seen.in_flight, seen.decoding) == (len(waiting) + len(decoding), len(decoding))
        assert seen.uncached_tokens == 100 * len(waiting)
        assert seen.context_tokens == 150 * len(decoding)


def test_of_a_pod_of_which_nothing_was_heard_only_the_weight_is_known() -> None:
    state = PodState()
    state.weight = 3.0
    seen = seen_of(state, 100.0)
    assert seen == replace(Made(PodId("pod"), weight=3.0), cost=PRIOR, cost_is_prior=True)


def test_a_row_has_each_number_in_its_own_column() -> None:
    """Rows are built by position, because names take longer. All numbers here differ, so a wrong place shows."""
    state = reporting()
    state.weight = 3.0
    send(state, "a", 1000, 1.0)
    state.first_token("a", now_s=1.5)
    send(state, "b", 2000, 1.625)
    seen = seen_of(state, 1.75)
    assert seen.free_at_s == pytest.approx(1.625 + 0.2075)  # b's prefill, plus one and a half steps
    assert seen == Made(
        pod_id=PodId("pod"),
        in_flight=2,
        uncached_tokens=2000,
        decoding=1,
        context_tokens=1050,
        free_at_s=seen.free_at_s,
        stepped_s=1.5,
        cost=COST,
        weight=3.0,
    )
