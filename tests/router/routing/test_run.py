"""Successive prompts that share one prefix (a run), and what `affinity_groups` does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.policies import make_policy
from router.routing.run import MANY, Run
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import Made, choose

PODS = [Made(PodId(f"pod-{i}"), cost=StepCost(base_s=0.01, token_s=1e-4)) for i in range(8)]
COMMON, OWN = 10, 4
TOKENS = 64


def request(prefix: int, number: int, at_s: float = 0.0) -> RequestInfo:
    """Return a request with `COMMON` keys of the prefix, followed by `OWN` keys of its own."""
    first, own = (prefix + 1) * 10_000, (number + 1) * 1_000_000
    keys = (*range(first, first + COMMON), *range(own, own + OWN))
    return RequestInfo(tuple(map(PrefixKey, keys)), TOKENS * len(keys), at_s, 64)


@given(prefixes=st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_a_prefix_is_all_that_is_asked_for_after_more_in_a_row_than_chance_explains(prefixes: list[int]) -> None:
    run, in_a_row, before = Run(), 0, -1
    for number, prefix in enumerate(prefixes):
        in_a_row, before = (in_a_row + 1 if prefix == before else 1), prefix
        asked = request(prefix, number)
        common = run.common(asked)
        assert common == (COMMON if in_a_row > 1 else 0)
        assert run.is_pair(common) == (in_a_row == 2)
        assert run.is_all(common, 0.1) == (in_a_row >= MANY)
        assert run.is_all(common, 0.5) == (in_a_row >= 7)
        assert run.is_all(common, 0.75) == (in_a_row >= 17)
        assert run.is_all(common, 1.0) == (in_a_row >= MANY)
        run.add(asked, common)


def test_what_is_common_to_less_than_half_of_a_prompt_is_no_prefix_of_all() -> None:
    run = Run()
    for number in range(10):
        keys = tuple(PrefixKey(key) for key in (1, 2, *range(100 * (number + 1), 100 * (number + 1) + 3)))
        asked = RequestInfo(keys, TOKENS * len(keys), 0.0)
        common = run.common(asked)
        assert not run.is_all(common, 0.1)
        run.add(asked, common)
    assert run.common(RequestInfo((), 10, 0.0)) == 0


def chosen(asked: Sequence[RequestInfo], pods: Sequence[Made], holders: Sequence[int] = (0,)) -> list[int]:
    """Return where `affinity_groups` sends the requests. The pods `holders` and all pods chosen so far hold the
    prefix."""
    policy, held = make_policy("affinity_groups"), set(holders)
    places = []
    for one in asked:
        views = [replace(pod, matched_tokens=TOKENS * COMMON if i in held else 0) for i, pod in enumerate(pods)]
        explained = choose(policy, one, views, explain=True).pod
        places.append(choose(policy, one, views).pod)
        assert explained == places[-1]
        held.add(places[-1])
    return places


def test_pods_take_turns_while_nothing_but_one_prefix_is_asked_for() -> None:
    places = chosen([request(0, number, 0.001 * number) for number in range(40)], PODS)
    assert places[: MANY - 1] == [0] * (MANY - 1)
    turns = places[MANY - 1 :]
    assert sorted(turns[:7]) == list(range(1, 8))
    assert all(len(set(turns[i : i + 8])) == 8 for i in range(len(turns) - 8))


@given(queued=st.integers(0, 3000))
def test_two_in_a_row_are_enough_if_the_wait_for_the_prefix_exceeds_its_prefill(queued: int) -> None:
    policy, held = make_policy("affinity_groups"), TOKENS * COMMON
    pods = [replace(PODS[0], matched_tokens=held, uncached_tokens=queued), *PODS[1:]]
    assert choose(policy, request(0, 1), PODS[:1]).pod == 0
    assert (choose(policy, request(0, 2), pods).pod != 0) == (queued > held)
    other = replace(PODS[0], matched_tokens=held, uncached_tokens=3000)
    assert choose(policy, request(1, 3), [other, *PODS[1:]]).pod == 0, "a prefix's first request goes to its holder"


def test_a_prompt_that_goes_on_from_the_last_one_or_repeats_it_makes_no_pair() -> None:
    run, first = Run(), request(0, 1)
    run.add(first, run.common(first))
    turn = replace(first, keys=(*first.keys, PrefixKey(7)))
    assert [run.is_pair(run.common(asked)) for asked in (first, turn, request(0, 2))] == [False, False, True]


def test_a_pod_with_too_many_requests_misses_its_turn() -> None:
    busy = [replace(pod, in_flight=40 if i == 3 else 4) for i, pod in enumerate(PODS)]
    assert 3 not in chosen([request(0, number, 0.001 * number) for number in range(30)], busy)


def test_prefixes_that_come_in_turn_stay_where_they_are() -> None:
    """The requests are too few to form groups, or to make the pod exceed its bound."""
    assert set(chosen([request(number % 2, number, 0.1 * number) for number in range(5)], PODS)) == {0}


def test_a_conversation_stays_on_its_pod_whatever_was_asked_for_before() -> None:
    policy = make_policy("affinity_groups")
    for number in range(10):
        choose(policy, request(0, number, 0.1 * number), PODS)
    pods = [replace(pod, matched_tokens=TOKENS * (COMMON + (3 if i == 5 else 0))) for i, pod in enumerate(PODS)]
    assert choose(policy, request(0, 3, 1.0), pods).pod == 5
