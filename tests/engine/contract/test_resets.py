"""Answers to a reset: the body may be anything, and only `"success": false` means that nothing was emptied."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.contract import resets
from engine.contract.resets import pauses_s, refusal

values = st.none() | st.booleans() | st.integers() | st.text(max_size=300)
answers = st.dictionaries(st.sampled_from(("success", "message", "freed_blocks")) | st.text(max_size=5), values)


@given(answers | values | st.lists(values))
def test_only_success_false_is_a_refusal(answer: Any) -> None:
    said = refusal(json.dumps(answer).encode())
    assert (said is not None) == (isinstance(answer, dict) and answer.get("success") is False)
    assert said is None or len(said) < 400


@given(st.binary(max_size=40))
def test_words_that_are_no_json_leave_the_status_to_say_it(body: bytes) -> None:
    refusal(body)
    assert refusal(b"Cache flushed.\n" + body) is None


def test_repetitions_are_bounded() -> None:
    pauses = list(pauses_s())
    assert sum(pauses) == resets.REPEATED_S
    assert all(0 < pause_s <= 1.0 for pause_s in pauses)
    assert len(pauses) < 20
