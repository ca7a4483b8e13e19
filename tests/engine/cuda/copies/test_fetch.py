"""Fetch or recompute: never slower than computing, and the best of all cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import StepCost
from engine.tiers.copies.base import BlockPair
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.copies.fetch import Held, Prefill, choose, compute_s, first_token_s
from tests.engine.cuda.copies.copy_script import BLOCK_S, ScriptedEngine

seconds = st.floats(0, 2)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Prefill, Held]:
    block_tokens = draw(st.sampled_from((1, 4, 16)))
    cached, held = draw(st.integers(0, 40)), draw(st.integers(0, 60))
    rest = draw(st.integers(1, 300))
    cost = StepCost(
        base_s=draw(st.floats(0, 0.1)), token_s=draw(st.floats(0, 1e-3)), attention_s=draw(st.floats(0, 1e-6))
    )
    prefill = Prefill(
        prompt_tokens=(cached + held) * block_tokens + rest,
        cached_tokens=cached * block_tokens,
        step_tokens=draw(st.integers(1, 600)),
        cost=cost,
        queue_s=draw(seconds),
    )
    return prefill, Held(held, block_tokens, block_s=draw(st.floats(0, 0.02)), queue_s=draw(seconds))


@given(questions())
def test_the_choice_is_the_best_of_all_cuts(question: tuple[Prefill, Held]) -> None:
    prefill, held = question
    choice = choose(prefill, held)
    best = min(first_token_s(prefill, held, blocks) for blocks in range(held.blocks + 1))
    assert 0 <= choice.fetched_blocks <= held.blocks
    assert choice.first_token_s == first_token_s(prefill, held, choice.fetched_blocks)
    assert choice.first_token_s <= best + 1e-9
    assert choice.first_token_s <= choice.recompute_s


@given(questions(), st.floats(0.001, 0.1), st.sampled_from([0.0, 0.3, 1.0]))
def test_beside_the_steps_of_others_the_choice_is_still_the_best(
    question: tuple[Prefill, Held], next_s: float, further: float
) -> None:
    """The choice is at most one block's computation slower than the best. A prompt that waits for its fetch begins at
    the end of a step."""
    prefill, held = replace(question[0], next_s=next_s, further_s=further * next_s), question[1]
    choice = choose(prefill, held)
    best_s = min(first_token_s(prefill, held, blocks) for blocks in range(held.blocks + 1))
    block_s = held.block_tokens * (prefill.cost.token_s + prefill.cost.attention_s * prefill.prompt_tokens)
    per_step_s = prefill.cost.base_s * held.block_tokens / prefill.step_tokens
    assert best_s <= choice.first_token_s <= best_s + block_s + per_step_s + 1e-9
    if choice.fetched_blocks and prefill.begins_s(held.queue_s + choice.fetched_blocks * held.block_s) > 0:
        begins_s = choice.first_token_s - compute_s(
            prefill, prefill.cached_tokens + choice.fetched_blocks * held.block_tokens
        )
        waits = begins_s > prefill.queue_s + 1e-9
        assert not waits or begins_s >= next_s - 1e-9
        if waits and prefill.further_s > 1e-6:
            steps = (begins_s - next_s) / prefill.further_s
            assert abs(steps - round(steps)) < 1e-6


@given(questions())
def test_a_tier_is_not_waited_for_when_computing_is_faster(question: tuple[Prefill, Held]) -> None:
    """The tier's queue alone takes longer than the whole prefill."""
    prefill, held = question
    recompute_s = first_token_s(prefill, held, 0)
    assert choose(prefill, replace(held, queue_s=recompute_s + 1e-6)).fetched_blocks == 0


@given(questions())
def test_nothing_is_fetched_while_the_prefill_rate_is_not_known(question: tuple[Prefill, Held]) -> None:
    prefill, held = question
    assert choose(replace(prefill, cost=StepCost()), held).fetched_blocks == 0


BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 131_072
COST = StepCost(base_s=0.003, token_s=27e-6, attention_s=0.8e-9)
"""Approximately an 8B model on an H200: 8k tokens take some 0.27 s."""


def held(tokens: int, bytes_per_s: float, queue_s: float = 0.0) -> Held:
    return Held(tokens // BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_BYTES / bytes_per_s, queue_s)


@pytest.mark.parametrize(
    ("bytes_per_s", "fetches"),
    [(55e9, True), (7e9, True), (3e9, False)],
    ids=["PCIe 5 x16", "a fast NVMe", "a slow one"],
)
def test_rates_decide(bytes_per_s: float, fetches: bool) -> None:
    """SGLang 26305: 8k tokens were fetched from a file tier although computing them was faster."""
    prefill = Prefill(prompt_tokens=8192, cached_tokens=0, step_tokens=8192, cost=COST)
    choice = choose(prefill, held(8176, bytes_per_s))
    assert choice.fetched_blocks == (511 if fetches else 0)


def test_the_tiers_costs_are_those_of_its_copies() -> None:
    engine = ScriptedEngine(64, 64)
    copier = BlockCopier(engine, lambda: 0.0)
    assert Held.measured(copier, 5, BLOCK_TOKENS) is None
    copier.promote([BlockPair(0, 0)])
    engine.end_all()
    copier.poll()
    copier.promote([BlockPair(i, i) for i in range(3)])
    found = Held.measured(copier, 5, BLOCK_TOKENS)
    assert found is not None
    assert (found.blocks, found.block_tokens) == (5, BLOCK_TOKENS)
    assert (found.block_s, found.queue_s) == pytest.approx((BLOCK_S, 3 * BLOCK_S))


def test_a_copy_that_stalls_is_given_up_for_computing() -> None:
    """A further call during the copy considers the rest of the fetch at the present rate."""
    engine, now_s = ScriptedEngine(64, 64), [0.0]
    copier = BlockCopier(engine, lambda: now_s[0])
    copier.promote([BlockPair(0, 0)])
    engine.end_all()
    copier.poll()
    prompt = Prefill(65 * BLOCK_TOKENS, 0, 8192, cost=StepCost(token_s=2 * BLOCK_S / BLOCK_TOKENS))
    first = Held.measured(copier, 60, BLOCK_TOKENS)
    assert first is not None
    assert choose(prompt, first).fetched_blocks == 60
    copier.promote([BlockPair(i, i) for i in range(60)])
    now_s[0] = 1000.0
    stalled = Held.measured(copier, 0, BLOCK_TOKENS)
    assert stalled is not None
    computed_s = first_token_s(prompt, stalled, 0)
    assert stalled.queue_s > computed_s, "waiting for the open copy would take longer than computing all"


def test_a_slow_tier_is_used_while_the_request_has_to_wait_anyway() -> None:
    """The request fetches blocks that arrive before the device is free, and one more if computing it takes longer."""
    waiting = Prefill(prompt_tokens=8192, cached_tokens=0, step_tokens=8192, cost=COST, queue_s=0.1)
    slow = held(8176, 3e9)
    in_time = int(0.1 / slow.block_s)
    assert 0 < in_time < slow.blocks
    assert choose(waiting, slow).fetched_blocks in (in_time, in_time + 1)


def test_a_long_queue_of_copies_is_counted() -> None:
    prefill = Prefill(prompt_tokens=8192, cached_tokens=0, step_tokens=8192, cost=COST)
    assert choose(prefill, held(8176, 55e9, queue_s=0.2)).fetched_blocks == 511
    assert choose(prefill, held(8176, 55e9, queue_s=0.4)).fetched_blocks == 0
