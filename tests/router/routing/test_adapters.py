"""Which adapters a pod has loaded. Pods with the adapter are preferred if that costs less than a load."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.policies import PolicyOptions, make_policy
from router.views.adapters import HELD_S, LOAD_S, MOST_LOAD_S, AdapterLoads, Adapters
from router.views.latency import ENOUGH_OBSERVATIONS
from router.views.pod_state import PodState
from router.views.speeds import SpeedPool
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import Made, choose, seen_of

NAMES = st.sampled_from("abcdef")
COST = StepCost(base_s=0.005, token_s=1e-4)


def test_a_pod_that_tells_nothing_costs_nothing() -> None:
    adapters = Adapters()
    adapters.used("sql")
    assert adapters.loaded is None
    assert adapters.setup_s("sql") == adapters.setup_s("law") == 0.0


def test_what_runs_is_loaded_and_stays_so_until_others_take_its_place() -> None:
    adapters = Adapters()
    adapters.seen(2, frozenset({"sql"}), frozenset())
    assert (adapters.setup_s("sql"), adapters.setup_s("law")) == (0.0, LOAD_S)
    adapters.seen(2, frozenset(), frozenset())
    assert adapters.setup_s("sql") == 0.0, "no other adapter took its place"
    adapters.used("law")
    assert adapters.setup_s("law") == adapters.setup_s("sql") == 0.0
    adapters.used("med")
    assert adapters.setup_s("sql") == LOAD_S


def test_if_every_place_is_in_use_a_request_waits_for_one() -> None:
    adapters = Adapters()
    adapters.seen(2, frozenset({"sql", "law"}), frozenset({"med"}))
    assert adapters.setup_s("sql") == 0.0
    assert adapters.setup_s("other") == LOAD_S + HELD_S


@given(most=st.integers(1, 4), uses=st.lists(st.one_of(NAMES, st.frozensets(NAMES, max_size=4)), max_size=30))
def test_it_holds_the_last_used_and_never_more_than_it_can(most: int, uses: list[Any]) -> None:
    adapters = Adapters()
    adapters.seen(most, frozenset(), frozenset())
    order: list[str] = []
    for use in uses:
        if isinstance(use, str):
            adapters.used(use)
            touched = [use]
        else:
            adapters.seen(most, use, frozenset())
            touched = sorted(use)
        order = [name for name in order if name not in touched] + touched
        assert list(adapters.loaded or ()) == order[-most:]
        assert all((adapters.setup_s(name) == 0.0) == (name in order[-most:]) for name in "abcdef")


def pod(name: str, *, adapter_s: float = 0.0, wait_s: float = 0.0, held: int = 0) -> Made:
    return Made(PodId(name), held, free_at_s=10.0 + wait_s, cost=COST, adapter_s=adapter_s)


def chosen(*pods: Made, tokens: int = 500) -> str:
    policy = make_policy("predicted_ttft", PolicyOptions())
    request = RequestInfo(tuple(PrefixKey(n) for n in range(8)), tokens, 10.0)
    return pods[choose(policy, request, pods).pod].pod_id


def test_a_pod_with_the_adapter_goes_first_unless_its_queue_or_its_cache_costs_more_than_a_load() -> None:
    assert chosen(pod("a", adapter_s=LOAD_S), pod("b")) == "b"
    assert chosen(pod("a"), pod("b", adapter_s=LOAD_S)) == "a"
    assert chosen(pod("a", adapter_s=LOAD_S), pod("b", wait_s=1.0)) == "a"
    assert chosen(pod("a", adapter_s=LOAD_S, held=7000), pod("b"), tokens=8000) == "a", "0.7 s of prefill"
    assert chosen(pod("a", adapter_s=LOAD_S, held=100), pod("b"), tokens=500) == "b", "0.01 s of prefill"
    assert chosen(pod("a", adapter_s=LOAD_S), pod("b"), tokens=20_000) == "b", "a long prompt makes no pods equal"


@given(st.lists(st.floats(-10, 100), max_size=60))
@settings(max_examples=30)
def test_what_a_load_takes_is_learnt_within_bounds(late: list[float]) -> None:
    loads = AdapterLoads()
    for late_s in late:
        loads.observe(late_s)
        assert 0 < loads.seconds <= MOST_LOAD_S
    for _ in range(100):
        loads.observe(0.4)
    assert abs(loads.seconds - 0.4) < 0.02


def test_first_tokens_of_requests_that_load_an_adapter_teach_how_long_that_takes_and_not_the_pods_speed() -> None:
    """Otherwise a pod that loads adapters for a third of its requests looks slow for the rest of them."""
    pool = SpeedPool()
    states = [PodState(pool), PodState(pool)]
    now_s = 100.0
    for number in range(30 * ENOUGH_OBSERVATIONS):
        for place, state in enumerate(states):
            loads = place == 0 and number % 3 == 0
            name, cached = f"{number}.{place}", None if number % 2 else 500  # None: known at the end
            state.sent(
                name, prompt_tokens=1500, uncached_tokens=1000, output_tokens=4, now_s=now_s, loads_adapter=loads
            )
            now_s += 0.02 + 1000 * 3e-4 + loads * 0.8
            state.first_token(name, now_s=now_s, cached_tokens=cached)
            state.finished(name, now_s=now_s + 0.1, uncached_tokens=1000)
            now_s += 0.2
    assert abs(pool.adapter_loads.seconds - 0.8) < 0.08
    first, second = (state.cost.token_s for state in states)
    assert first == second
    assert abs(first - 3.2e-4) < 0.3e-4


@given(
    load_s=st.floats(0.01, MOST_LOAD_S),
    waits=st.tuples(st.floats(0, 10), st.floats(0, 10)),
    tokens=st.integers(16, 4000),
)
@settings(max_examples=60)
def test_no_request_waits_longer_for_a_pod_that_has_its_adapter_than_a_load_takes(
    load_s: float, waits: tuple[float, float], tokens: int
) -> None:
    """So a hot adapter is loaded on a second pod, however long a load takes, and stays on one pod if the queue there is
    short. Scores count as equal if they differ by less than the request's own prefill, because predictions have larger
    errors."""
    has, lacks = pod("a", wait_s=waits[0]), pod("b", adapter_s=load_s, wait_s=waits[1])
    slack_s = 2 * COST.token_s * tokens + 2 * COST.base_s
    choice = chosen(has, lacks, tokens=tokens)
    # The delay for others counts, too: at most the mean queue, and at most the request's own prefill.
    if waits[0] > waits[1] + load_s + slack_s:
        assert choice == "b"
    if waits[0] < waits[1] + load_s - slack_s:
        assert choice == "a"


def test_a_hot_adapter_spreads_to_as_many_pods_as_it_needs() -> None:
    """A pod computes a request in 0.1 s and loads an adapter in 0.5 s. Of the four pods, one is too few for fifteen
    requests a second, and two for thirty. In the second half of the time no request waits as long as a load."""
    for rate, least in ((15.0, 2), (30.0, 4)):
        used, waited_s = spread(rate)
        assert len(used) >= least, (rate, used)
        assert waited_s < 0.5


def spread(rate: float, seconds: float = 20.0) -> tuple[set[int], float]:
    """Return which of four pods get an adapter's requests in the second half of the time, and the longest queue, in
    seconds."""
    pool, policy = SpeedPool(), make_policy("predicted_ttft", PolicyOptions())
    states, adapters = [PodState(pool) for _ in range(4)], [Adapters() for _ in range(4)]
    for each in adapters:
        each.seen(2, frozenset(), frozenset())
    free_s, ends = [0.0] * 4, list[tuple[float, int, int]]()
    used: set[int] = set()
    waited_s = 0.0
    for number in range(int(rate * seconds)):
        now_s = number / rate
        for end in sorted(end for end in ends if end[0] <= now_s):
            states[end[1]].first_token(str(end[2]), now_s=end[0], cached_tokens=0)
            states[end[1]].finished(str(end[2]), now_s=end[0])
        ends = [end for end in ends if end[0] > now_s]
        views = [seen_of(state, now_s, f"p{i}") for i, state in enumerate(states)]
        for view, each in zip(views, adapters, strict=True):
            view.adapter_s = each.setup_s("sql", pool.adapter_loads.seconds)
        info = RequestInfo(tuple(PrefixKey(8 * number + n) for n in range(8)), 1000, now_s, 1)
        place = choose(policy, info, views).pod
        loads = adapters[place].loads("sql")
        adapters[place].used("sql")
        states[place].sent(
            str(number), prompt_tokens=1000, uncached_tokens=1000, output_tokens=1, now_s=now_s, loads_adapter=loads
        )
        free_s[place] = max(free_s[place], now_s) + 0.1 + 0.5 * loads
        ends.append((free_s[place], place, number))
        if now_s > seconds / 2:
            used.add(place)
            waited_s = max(waited_s, free_s[place] - now_s - 0.1)
    return used, waited_s
