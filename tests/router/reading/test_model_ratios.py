"""Ratios learnt from answers follow what engines report, and no odd report spoils them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.reading.model_ratios import PRIOR_TOKENS_PER_BYTE, Estimates, ModelEstimate


@pytest.mark.parametrize(("canonical_bytes", "tokens"), [(0, 0), (0, 9), (9, 0), (9, -1)])
def test_an_answer_that_tells_no_tokens_or_had_no_text_teaches_nothing(canonical_bytes: int, tokens: int) -> None:
    estimate = ModelEstimate()
    estimate.saw_prompt(canonical_bytes, tokens)
    assert estimate == ModelEstimate()
    assert estimate.learnt is None


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_the_ratio_lies_between_the_prior_and_what_was_told(told: list[tuple[int, int]]) -> None:
    estimate = ModelEstimate()
    for canonical_bytes, tokens in told:
        estimate.saw_prompt(canonical_bytes, tokens)
    ratios = [PRIOR_TOKENS_PER_BYTE, *(tokens / canonical_bytes for canonical_bytes, tokens in told)]
    assert min(ratios) * (1 - 1e-9) <= estimate.tokens_per_byte <= max(ratios) * (1 + 1e-9)


def test_what_every_answer_tells_is_learnt_after_some_hundred() -> None:
    estimate = ModelEstimate()
    for _ in range(500):
        estimate.saw_prompt(3000, 1000)
        estimate.saw_output(40)
    assert estimate.tokens_per_byte == pytest.approx(1 / 3, rel=0.01)
    assert estimate.output_tokens == pytest.approx(40, rel=0.01)


def test_a_gateway_begins_with_what_another_one_has_learnt() -> None:
    taught, beginner = Estimates(), Estimates()
    taught.of("m").saw_prompt(3000, 1000)
    learnt = taught.of("m").learnt
    assert learnt is not None
    beginner.begin_with("m", learnt)
    assert beginner.of("m") == taught.of("m")
    assert beginner.of("another") == ModelEstimate()
