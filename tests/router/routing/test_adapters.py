"""Which adapters a pod has loaded, and that pods with the adapter are preferred where that costs less than a load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.adapters import HELD_S, LOAD_S, Adapters
from router.routing.policies import PolicyOptions, make_policy
from router.routing.types import PodId, PodView, RequestInfo

NAMES = st.sampled_from("abcdef")
COST = StepCost(base_s=0.005, token_s=1e-4)


def test_a_pod_that_tells_nothing_costs_nothing():
    adapters = Adapters()
    adapters.used("sql")
    assert adapters.loaded is None
    assert adapters.setup_s("sql") == adapters.setup_s("law") == 0.0


def test_what_runs_is_loaded_and_stays_so_until_others_take_its_place():
    adapters = Adapters()
    adapters.seen(2, frozenset({"sql"}), frozenset())
    assert (adapters.setup_s("sql"), adapters.setup_s("law")) == (0.0, LOAD_S)
    adapters.seen(2, frozenset(), frozenset())
    assert adapters.setup_s("sql") == 0.0, "nobody took its place"
    adapters.used("law")
    assert adapters.setup_s("law") == adapters.setup_s("sql") == 0.0
    adapters.used("med")
    assert adapters.setup_s("sql") == LOAD_S


def test_where_every_place_is_in_use_a_request_waits_for_one():
    adapters = Adapters()
    adapters.seen(2, frozenset({"sql", "law"}), frozenset({"med"}))
    assert adapters.setup_s("sql") == 0.0
    assert adapters.setup_s("other") == LOAD_S + HELD_S


@given(most=st.integers(1, 4), uses=st.lists(st.one_of(NAMES, st.frozensets(NAMES, max_size=4)), max_size=30))
def test_it_holds_the_last_used_and_never_more_than_it_can(most, uses):
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


def pod(name: str, *, adapter_s: float = 0.0, wait_s: float = 0.0, held: int = 0) -> PodView:
    return PodView(PodId(name), held, prefill_free_at_s=10.0 + wait_s, cost=COST, adapter_s=adapter_s)


def chosen(*pods: PodView, tokens: int = 500) -> str:
    policy = make_policy("predicted_ttft", PolicyOptions())
    request = RequestInfo(tuple(PrefixKey(n) for n in range(8)), tokens, 10.0)
    return pods[policy.choose(request, pods).pod].pod_id


def test_a_pod_with_the_adapter_goes_first_unless_its_queue_or_its_cache_costs_more_than_a_load():
    assert chosen(pod("a", adapter_s=LOAD_S), pod("b")) == "b"
    assert chosen(pod("a"), pod("b", adapter_s=LOAD_S)) == "a"
    assert chosen(pod("a", adapter_s=LOAD_S), pod("b", wait_s=1.0)) == "a"
    assert chosen(pod("a", adapter_s=LOAD_S, held=7000), pod("b"), tokens=8000) == "a", "0.7 s of prefill"
    assert chosen(pod("a", adapter_s=LOAD_S, held=100), pod("b"), tokens=500) == "b", "0.01 s of prefill"
    assert chosen(pod("a", adapter_s=LOAD_S), pod("b"), tokens=20_000) == "b", "long prompts make no tie of it"
