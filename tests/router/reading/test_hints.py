"""A session's name: read from any client, bounded, and used only to choose among equal pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.reading.inbound import MAX_SESSION_CHARS, SESSION_FIELDS, session_of
from router.routing.policies import POLICY_NAMES, make_policy
from router.views.types import PodId, RequestInfo
from tests.router.rig.helpers import ScriptedEngine, answers, running
from tests.router.routing.pods import Made, choose

SESSIONS = st.integers(1, 2**64 - 1)
KEYS = st.lists(st.integers(0, 2**64 - 1).map(PrefixKey), max_size=3).map(tuple)
BY_SCORE = ("least_loaded", "cache_aware", "predicted_ttft")


def test_a_session_is_named_by_a_header_or_in_the_body() -> None:
    numbers = {session_of(CIMultiDict({field.title(): "s1"}), {}, "t") for field in SESSION_FIELDS}
    assert numbers == {session_of({}, {"prompt_cache_key": "s1"}, "t")}
    both = CIMultiDict({SESSION_FIELDS[1]: "s2", SESSION_FIELDS[0]: "s1"})
    assert {session_of(both, {"prompt_cache_key": "s3"}, "t")} == numbers
    assert session_of({}, {"prompt_cache_key": "s1"}, "u") not in numbers
    assert session_of({}, {}, "t") == 0


@given(st.none() | st.integers() | st.lists(st.text()) | st.just("") | st.just("x" * (MAX_SESSION_CHARS + 1)))
def test_what_is_no_name_is_no_session(value: Any) -> None:
    assert session_of({}, {"prompt_cache_key": value}, "t") == 0


@given(st.text(min_size=1, max_size=MAX_SESSION_CHARS))
def test_any_text_is_a_session(name: str) -> None:
    assert 0 < session_of(CIMultiDict({SESSION_FIELDS[2]: name}), {}, "t") < 2**64
    assert session_of(CIMultiDict({SESSION_FIELDS[2]: "\udcff"}), {}, "t") > 0


@settings(max_examples=30)
@pytest.mark.parametrize("name", BY_SCORE)
@given(session=SESSIONS, keys=st.lists(KEYS, min_size=2, max_size=6), count=st.integers(2, 6))
def test_among_equals_a_session_goes_to_one_pod(
    name: str, session: int, keys: list[tuple[PrefixKey, ...]], count: int
) -> None:
    pods = [Made(PodId(f"pod-{i}")) for i in range(count)]
    chosen = {
        choose(make_policy(name), RequestInfo(one, 100, 50.0 + i, session=session), pods).pod
        for i, one in enumerate(keys)
    }
    assert len(chosen) == 1


@settings(max_examples=30)
@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name not in BY_SCORE])
@given(session=SESSIONS, keys=KEYS)
def test_a_session_changes_nothing_for_a_policy_that_ignores_it(
    name: str, session: int, keys: tuple[PrefixKey, ...]
) -> None:
    pods = [Made(PodId(f"pod-{i}"), in_flight=i, uncached_tokens=i * 100) for i in range(4)]
    with_session, without = (
        choose(make_policy(name), RequestInfo(keys, 100, 50.0, session=number), pods).pod for number in (session, 0)
    )
    assert with_session == without


@settings(max_examples=30)
@pytest.mark.parametrize("name", BY_SCORE)
@given(session=SESSIONS, keys=KEYS, best=st.integers(0, 3))
def test_it_is_never_a_pin(name: str, session: int, keys: tuple[PrefixKey, ...], best: int) -> None:
    pods = [
        Made(
            PodId(f"pod-{i}"),
            cost=StepCost(base_s=6e-3, token_s=22e-6),
            in_flight=0 if i == best else 3,
            uncached_tokens=0 if i == best else 9000,
            free_at_s=0.0 if i == best else 60.0,
        )
        for i in range(4)
    ]
    decision = choose(make_policy(name), RequestInfo(keys, 100, 50.0, session=session), pods)
    assert decision.pod == best


async def test_short_turns_of_a_session_meet_one_pod() -> None:
    engines = [ScriptedEngine(pod, answers(200, b'{"choices":[]}')) for pod in "abcd"]
    async with running(*engines, policy="least_loaded") as gateway:
        for session in ("one", "two", "three", "four"):
            turns = [
                await gateway.post({"model": "m", "prompt": f"{session} {i}"}, **{"X-Session-Affinity": session})
                for i in range(4)
            ]
            assert len({turn.pod for turn in turns}) == 1
