"""One tenant's requests, by session: no session starves another, and no request is lost. Without sessions, only
deadlines decide."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.overload.flow import SESSIONS, Flow, Waiting
from router.overload.line import Line, LineLimits
from router.overload.queue import FairQueue
from tests.router.overload.test_queue import served, waiting
from tests.router.overload.test_shares import Pod

GREEDY = 7
TOKENS = st.integers(1, 50)
SESSION = st.sampled_from([0, 0, GREEDY, 2, 3, SESSIONS + 3])


def full(requests: list[Waiting]) -> FairQueue:
    queue = FairQueue(10_000, 10**9)
    for request in requests:
        assert queue.push(request) == []
    return queue


@given(st.lists(st.tuples(TOKENS, st.floats(1, 100)), min_size=1, max_size=60))
def test_without_sessions_the_deadline_alone_decides(asked: list[tuple[int, float]]) -> None:
    requests = [waiting(tokens=tokens, deadline_s=deadline_s) for tokens, deadline_s in asked]
    queue = full(requests)
    wanted = sorted(requests, key=lambda request: request.key)
    assert list(queue.order()) == wanted
    assert served(queue, len(requests)) == wanted


@given(st.lists(TOKENS, min_size=50, max_size=300), st.lists(st.tuples(st.integers(100, 120), TOKENS), max_size=20))
def test_a_polite_session_waits_for_no_more_of_a_greedy_one_than_of_itself(
    greedy: list[int], polite: list[tuple[int, int]]
) -> None:
    """All greedy requests came first. Before a polite session's request, the greedy session gets at most as many tokens
    as the polite one has got so far, plus one request."""
    first = [waiting(tokens=tokens, session=GREEDY) for tokens in greedy]
    later = [waiting(tokens=tokens, session=session) for session, tokens in polite]
    queue = full([*first, *later])
    got: Counter[int] = Counter()
    left = Counter(session for session, _ in polite)
    for request in served(queue, len(first) + len(later)):
        if request.session != GREEDY:
            assert got[GREEDY] <= got[request.session] + max(greedy)
            left[request.session] -= 1
        got[request.session] += request.tokens
    assert not len(queue)
    assert not +left


@given(st.integers(0, 40))
def test_a_session_that_comes_while_a_greedy_one_is_served_goes_next_but_one(after: int) -> None:
    queue = full([waiting(session=GREEDY) for _ in range(100)])
    served(queue, after)
    polite = waiting(session=2)
    assert queue.tokens_before(polite) <= polite.tokens
    queue.push(polite)
    assert polite in served(queue, 2)


def test_a_session_that_asks_again_and_again_alternates_with_a_greedy_one() -> None:
    queue = full([waiting(session=GREEDY) for _ in range(100)])
    got: Counter[int] = Counter()
    for _ in range(40):
        queue.push(waiting(session=2))
        got += Counter(request.session for request in served(queue, 2))
    assert abs(got[GREEDY] - got[2]) <= 2


def test_requests_without_a_session_count_as_one_each() -> None:
    """Each of these requests has a share like a session, so a greedy session cannot shut them out."""
    queue = full([*(waiting(session=GREEDY) for _ in range(100)), *(waiting() for _ in range(50))])
    order = [request.session for request in served(queue, 60)]
    assert order.index(GREEDY) <= 1
    assert order[:54].count(0) >= 48
    got: Counter[int] = Counter()
    for _ in range(200):
        queue.push(waiting())
        got += Counter(request.session for request in served(queue, 1))
    assert got[GREEDY] >= 10, "a stream of requests without a session shut out one that has a session"


def test_a_full_queue_drops_the_greedy_sessions_last_request() -> None:
    queue = FairQueue(4, 10**6)
    greedy = [waiting(session=GREEDY) for _ in range(4)]
    for request in greedy:
        queue.push(request)
    assert queue.push(waiting(session=2)) == [greedy[-1]]
    assert queue.push(waiting()) == [greedy[-2]]
    assert queue.push(late := waiting(session=GREEDY)) == [late]


@given(st.lists(st.tuples(st.booleans(), SESSION, TOKENS, st.floats(0, 50)), max_size=80))
def test_nothing_is_lost_whatever_comes_and_goes(steps: list[tuple[bool, int, int, float]]) -> None:
    """The first request of `order` is the one served next. An empty flow remembers no session."""
    flow = Flow(1.0, 0.0)
    inside: list[Waiting] = []
    for number, (comes, session, tokens, deadline_s) in enumerate(steps):
        if comes or not inside:
            request = waiting(session=session, tokens=tokens, deadline_s=deadline_s)
            request.number = number
            assert 0 <= flow.tokens_before(request) <= flow.tokens
            flow.add(request)
            inside.append(request)
        else:
            request = flow.first()
            assert request is next(flow.order())
            flow.pay(request)
            flow.remove(request)
            inside.remove(request)
        assert Counter(map(id, flow.order())) == Counter(map(id, inside))
        assert (flow.count, flow.tokens) == (len(inside), sum(request.tokens for request in inside))
        assert {id(one) for one in flow.expired(25.0)} == {id(one) for one in inside if one.deadline_s <= 25.0}
        assert inside or not flow._sessions
        assert len(flow._sessions) <= SESSIONS + 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(TOKENS, min_size=100, max_size=200),
    st.lists(st.tuples(st.integers(100, 110), st.integers(0, 2000), TOKENS), max_size=30),
)
def test_in_time_a_polite_request_waits_for_a_greedy_one_and_the_other_polite_ones(
    greedy: list[int], polite: list[tuple[int, int, int]]
) -> None:
    """The engine takes one request at a time, a millisecond for each token. A request waits for all polite requests,
    for as much greedy work as its own session has, and for two greedy requests more."""
    line = Line(LineLimits(1000, 2**20))
    for tokens in greedy:
        line.enter(waiting(tokens=tokens, session=GREEDY), 0.0)
    comes = sorted((at_ms, session, tokens) for session, at_ms, tokens in polite)
    requests = [waiting(tokens=tokens, session=session, arrived_s=at_ms / 1000) for at_ms, session, tokens in comes]
    coming, now_s = list(requests), 0.0
    let_go: dict[int, float] = {}
    while len(line) or coming:
        while coming and coming[0].arrived_s <= now_s:
            line.enter(coming[0], now_s)
            coming.pop(0)
        release = line.next([Pod()], now_s, lambda request, avoided: 0.0)
        if release is None:
            now_s = coming[0].arrived_s
            continue
        let_go[id(release.request)] = now_s
        now_s += release.request.tokens / 1000
    assert len(let_go) == len(greedy) + len(requests)
    total_s = sum(request.tokens for request in requests) / 1000
    for request in requests:
        own_s = sum(other.tokens for other in requests if other.session == request.session) / 1000
        bound_s = 2 * max(greedy) / 1000 + total_s + own_s
        assert let_go[id(request)] - request.arrived_s <= bound_s + 1e-9
