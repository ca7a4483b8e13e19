"""An engine's metrics correct what is known of other gateways' load. They do not change what this gateway itself knows
of its own requests."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from router.views.pod_state import PodState
from router.views.reported import FRESH_S, STALE_S, Counts
from tests.router.routing.pods import seen_of


def busy(requests: int, *, decoding: int = 0, now_s: float = 10.0) -> PodState:
    """Return a pod with `requests` requests of this gateway; `decoding` of them have their first token."""
    state = PodState()
    for number in range(requests):
        state.sent(str(number), prompt_tokens=1000, uncached_tokens=800, output_tokens=100, now_s=now_s)
    for number in range(decoding):
        state.first_token(str(number), now_s=now_s)
    return state


def count(state: PodState, counts: Counts, *, now_s: float = 10.0, capacity_tokens: int | None = None) -> None:
    state.counted(counts, state.mark, capacity_tokens=capacity_tokens, now_s=now_s)


def test_requests_beyond_those_known_here_are_others() -> None:
    state = busy(3, decoding=1)
    count(state, Counts(running=4, waiting=3))
    seen = seen_of(state, 10.0)
    assert seen.in_flight == 7
    assert seen.uncached_tokens > 2 * 800, "one waiting request is another gateway's, and two are ours"
    assert seen.decoding == 1 + 3


@given(own=st.integers(0, 6), decoding=st.integers(0, 6), running=st.integers(0, 6), waiting=st.integers(0, 6))
def test_if_the_page_shows_only_known_requests_nothing_changes(
    own: int, decoding: int, running: int, waiting: int
) -> None:
    told = min(own, running + waiting)
    counts = Counts(min(running, told), told - min(running, told))
    state, untold = busy(own, decoding=min(own, decoding)), busy(own, decoding=min(own, decoding))
    count(state, counts)
    assert asdict(seen_of(state, 10.5)) == asdict(seen_of(untold, 10.5))


@given(first=st.integers(0, 8), ended=st.integers(0, 8), begun=st.integers(0, 8), at_the_page=st.integers(0, 16))
def test_a_request_that_begins_or_ends_while_a_page_arrives_counts_once(
    first: int, ended: int, begun: int, at_the_page: int
) -> None:
    state = busy(first)
    since = state.mark
    for number in range(min(first, ended)):
        state.finished(str(number), now_s=10.0)
    for number in range(begun):
        state.sent(f"new {number}", prompt_tokens=10, uncached_tokens=10, output_tokens=1, now_s=10.0)
    told = min(at_the_page, first + begun)  # whenever the page was made, all requests on it are this gateway's
    state.counted(Counts(told, 0), since, capacity_tokens=None, now_s=10.0)
    assert seen_of(state, 10.0).in_flight == max(0, first - ended) + begun


@given(running=st.integers(0, 6), waiting=st.integers(0, 6), heard=st.integers(0, 8), later=st.integers(0, 3))
def test_a_request_of_another_gateway_that_is_heard_of_after_the_count_is_there_once(
    running: int, waiting: int, heard: int, later: int
) -> None:
    state = PodState()
    count(state, Counts(running, waiting, 0.5), capacity_tokens=10_000)
    for number in range(heard + later):
        sent_s = 9.99 if number < heard else 10.01
        state.sent_elsewhere(f"g{number}", prompt_tokens=100, uncached_tokens=80, output_tokens=10, now_s=sent_s)
    seen = seen_of(state, 10.02)
    assert seen.in_flight == max(running + waiting, heard) + later
    assert seen.context_tokens >= 0
    if heard >= running + waiting:
        assert seen.uncached_tokens <= 80 * (heard + later)


def test_the_correction_fades_with_age_and_is_gone() -> None:
    state = PodState()
    count(state, Counts(running=8, waiting=0, kv_used=0.5))
    loads = [(load.in_flight, load.kv_used) for age_s in (0, FRESH_S, 6) for load in (state.load(10.0 + age_s),)]
    assert loads[0] == loads[1] == (8, 0.5)
    assert 0 < loads[2][0] < 8
    assert asdict(seen_of(state, 10.0 + STALE_S)) == asdict(seen_of(PodState(), 10.0 + STALE_S))


def test_the_used_share_of_the_cache_tells_how_long_the_others_contexts_are() -> None:
    state = busy(1, decoding=1)
    count(state, Counts(running=3, waiting=0, kv_used=0.25), capacity_tokens=40_000)
    assert seen_of(state, 10.0).context_tokens == 10_000
    count(state, Counts(running=1, waiting=0, kv_used=0.25), capacity_tokens=40_000)
    assert seen_of(state, 10.0).context_tokens == 1_050, "all requests are ours, and ours are known"


def test_pods_whose_metrics_say_that_requests_wait_are_backed_up() -> None:
    state = PodState()
    for tick in range(3):
        count(state, Counts(running=4, waiting=2), now_s=10.0 + tick)
    assert state.backed_up_s(12.5) == 2.5
    assert state.waiting(12.5) == 2
    count(state, Counts(running=4, waiting=0), now_s=13.0)
    assert state.backed_up_s(13.5) == 0.0


@given(decoding=st.integers(1, 9))
def test_what_another_gateway_tells_is_taken_out_of_the_count_with_its_part_of_the_context(decoding: int) -> None:
    """All counted requests decode. One after the other, another gateway tells of them and of their end."""
    state = PodState()
    count(state, Counts(running=decoding, waiting=0, kv_used=0.9), capacity_tokens=10_000)
    before = seen_of(state, 10.0).context_tokens
    for known in range(1, decoding + 1):
        state.sent_elsewhere(f"{known}", prompt_tokens=1000, uncached_tokens=1, output_tokens=0, now_s=9.0)
        state.finished_elsewhere(f"{known}", now_s=10.0)
        seen = seen_of(state, 10.0)
        assert (seen.in_flight, seen.decoding) == (decoding - known, decoding - known)
        assert abs(seen.context_tokens - before * (decoding - known) / decoding) <= decoding
