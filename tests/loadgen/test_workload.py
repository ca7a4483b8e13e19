"""Prompts: reproducible, unique, growing turn by turn, popular tenants first."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.workload import Range, Session, WorkloadSpec, arm_salt, build_sessions

SPEC = WorkloadSpec(
    seed=1,
    tenants=4,
    zipf=1.0,
    system_words=Range(80, 120),
    question_words=Range(5, 15),
    turns=Range(2, 4),
    think_s=1.0,
    unique_share=0.0,
)
SEEDS = st.integers(0, 10**6)


def prompts(session: Session) -> list[str]:
    return [str(session.messages(["same"] * turn)) for turn in range(len(session.questions))]


@given(seed=SEEDS, short=st.integers(0, 6), more=st.integers(0, 6))
def test_equal_seeds_give_equal_sessions_and_a_longer_run_begins_with_the_shorter(seed: int, short: int, more: int):
    spec = replace(SPEC, seed=seed, unique_share=0.3)
    assert build_sessions(spec, short + more)[:short] == build_sessions(spec, short)


@given(seed=SEEDS)
def test_another_seed_gives_other_system_prompts(seed: int):
    one, other = (build_sessions(replace(SPEC, seed=s, tenants=1), 1)[0] for s in (seed, seed + 1))
    assert one.system != other.system
    assert one.questions != other.questions


@given(seed=SEEDS, answers=st.lists(st.text(), min_size=1, max_size=1))
def test_each_turn_extends_the_turn_before_by_its_answer_and_a_question(seed: int, answers: list[str]):
    session = build_sessions(replace(SPEC, seed=seed), 1)[0]
    given_answers = answers * (len(session.questions) - 1)
    for turn in range(1, len(session.questions)):
        before, after = session.messages(given_answers[: turn - 1]), session.messages(given_answers[:turn])
        assert after[: len(before)] == before
        assert after[len(before) :] == [
            {"role": "assistant", "content": given_answers[turn - 1]},
            {"role": "user", "content": session.questions[turn]},
        ]


@given(seed=SEEDS)
def test_no_two_requests_have_equal_prompts_even_where_answers_are_equal(seed: int):
    sessions = build_sessions(replace(SPEC, seed=seed, unique_share=0.2, question_words=Range(1, 1)), 30)
    everything = [prompt for session in sessions for prompt in prompts(session)]
    assert len(set(everything)) == len(everything)


def test_tenants_share_their_system_prompt_and_nobody_elses():
    sessions = build_sessions(SPEC, 60)
    by_tenant = {tenant: {s.system for s in sessions if s.tenant == tenant} for tenant in range(SPEC.tenants)}
    assert [len(systems) for systems in by_tenant.values()] == [1] * SPEC.tenants
    beginnings = {system[:60] for systems in by_tenant.values() for system in systems}
    assert len(beginnings) == SPEC.tenants


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.5])
def test_tenant_popularity_follows_zipf(zipf: float):
    count = 4000
    spec = replace(SPEC, zipf=zipf, system_words=Range(1, 1), question_words=Range(1, 1), turns=Range(1, 1))
    seen = Counter(session.tenant for session in build_sessions(spec, count))
    weights = [(tenant + 1) ** -zipf for tenant in range(spec.tenants)]
    for tenant, weight in enumerate(weights):
        share = weight / sum(weights)
        five_sigma = 5 * (share * (1 - share) / count) ** 0.5
        assert abs(seen[tenant] / count - share) < five_sigma


@given(seed=SEEDS, low=st.integers(10, 60), spread=st.integers(0, 40))
def test_sizes_are_in_range(seed: int, low: int, spread: int):
    sizes = Range(low, low + spread)
    for session in build_sessions(replace(SPEC, seed=seed, system_words=sizes, question_words=sizes), 5):
        assert sizes.low <= len(session.system.split()) <= max(sizes.high, 15)
        assert all(sizes.low <= len(text.split()) - 2 <= sizes.high for text in session.questions)
        assert SPEC.turns.low <= len(session.questions) <= SPEC.turns.high
        assert len(session.think_s) == len(session.questions) - 1


def test_unique_sessions_share_no_beginning():
    sessions = build_sessions(replace(SPEC, unique_share=1.0), 20)
    assert all(s.tenant is None and len(s.messages([])) == 1 for s in sessions)
    assert len({s.messages([])[0]["content"].split(".")[0] for s in sessions}) == 20


@given(seed=SEEDS)
def test_a_salt_changes_the_first_bytes_and_nothing_else(seed: int):
    session = build_sessions(replace(SPEC, seed=seed), 1)[0]
    salts = [arm_salt(seed, arm) for arm in ("round_robin", "predicted_ttft")]
    assert len({len(salt) for salt in salts}) == 1
    for one, other in itertools.combinations(salts, 2):
        assert one != other
    plain, salted = session.messages(["x"]), session.messages(["x"], salts[0])
    assert salted[0]["content"] == salts[0] + plain[0]["content"]
    assert salted[1:] == plain[1:]
