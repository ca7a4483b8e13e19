"""The attainable reuse, compared with a cache that is a set."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.keys import DEFAULT_STRIDE_BYTES, prefix_keys
from loadgen.measure.records import RequestRecord
from loadgen.measure.reuse import STRIDE_BYTES, attainable
from loadgen.measure.summary import summarise
from tests.loadgen.measure.builders import failed, made_run, request


def test_strides_are_those_of_the_keys() -> None:
    assert STRIDE_BYTES == DEFAULT_STRIDE_BYTES


def of_prompt(number: int, prompt: bytes, **fields: Any) -> RequestRecord:
    keys = prefix_keys(prompt, 7)
    return request(number, intended_s=float(number), prompt_bytes=len(prompt), prefix_keys=keys, **fields)


prompts = st.lists(
    st.lists(st.sampled_from([b"a" * 256, b"b" * 256, b"c" * 256]), max_size=4).map(
        lambda parts: b"".join(parts) + b"end"
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(sent=prompts, cached=st.integers(0, 100))
def test_attainable_is_what_an_infinite_shared_cache_finds(sent: list[bytes], cached: int) -> None:
    seen: set[bytes] = set()
    expected, wasted = 0.0, 0.0
    for prompt in sent:
        held = [prompt[: i * 256] for i in range(1, len(prompt) // 256 + 1)]
        hits = sum(part in seen for part in held)
        could = hits * 256 / len(prompt) * 100
        could = max(could, min(cached, (hits + 1) * 256 / len(prompt) * 100, 100.0))
        expected += could
        wasted += max(0.0, could - cached)
        seen |= set(held)
    records = [of_prompt(i, prompt, prompt_tokens=100, cached_tokens=cached) for i, prompt in enumerate(sent)]
    # The order of sending matters; the order in which requests end does not.
    found = attainable(made_run(records[::-1]).records)
    assert found.prompt_tokens == 100 * len(sent), "prompts shorter than a stride count, but have nothing to find"
    assert found.attainable_tokens == pytest.approx(expected)
    assert found.duplicated_tokens == pytest.approx(wasted)


def test_a_failed_request_may_have_filled_the_cache_but_is_not_counted() -> None:
    prompt = b"x" * 256 * 4
    first = failed(0, prompt_bytes=len(prompt), prefix_keys=prefix_keys(prompt, 7))
    found = summarise(made_run([first, of_prompt(1, prompt, prompt_tokens=200, cached_tokens=150)])).reuse
    assert found.attainable_rate == 1.0
    assert found.achieved_share == 0.75
    assert found.duplicated_prefill_tokens == 50


def test_whole_prompts_sent_again_are_counted() -> None:
    run = made_run([request(i, prompt_hash=h) for i, h in enumerate([5, 6, 5, 5, 0, 0])])
    assert summarise(run).reuse.duplicate_prompts == 2


def test_nothing_shared_and_nothing_known() -> None:
    alone = made_run([of_prompt(i, bytes([65 + i]) * 512, cached_tokens=0) for i in range(3)])
    assert attainable(alone.records).rate == 0
    assert summarise(alone).reuse.achieved_share is None
    unknown = summarise(made_run([request()])).reuse
    assert (unknown.attainable_rate, unknown.duplicated_prefill_tokens) == (None, None)


def test_what_goes_on_from_an_answer_finds_the_answer_as_well() -> None:
    def turn(
        session: int, number: int, after: int, prompt: bytes, prompt_tokens: int, cached_tokens: int
    ) -> RequestRecord:
        keys = prefix_keys(prompt, 7)
        return request(
            session,
            turn=number,
            after=after,
            intended_s=float(number),
            prompt_bytes=len(prompt),
            prefix_keys=keys,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=41,
        )

    first = turn(0, 0, -1, b"q" * 400, 100, 0)
    second = turn(0, 1, 0, b"q" * 400 + b"a" * 164 + b"r" * 36, 150, 140)
    elsewhere = turn(1, 1, 0, b"z" * 400, 100, 0)  # the session's first turn is not among the records
    found = attainable(made_run([first, second, elsewhere]).records)
    assert found.attainable_tokens == 100 + 41 - 1, "the last token of an answer is never computed"
    assert found.achieved_share == 1.0
    assert not found.is_exceeded


@given(cached=st.integers(0, 100), strides=st.integers(0, 4), tail=st.integers(1, 255))
def test_a_share_above_one_means_caches_that_were_not_empty(cached: int, strides: int, tail: int) -> None:
    """Prompts share whole strides and up to a stride more, which only an engine with finer blocks finds."""
    shared = b"s" * (256 * strides)
    prompts = [shared + bytes([65 + i]) * tail for i in range(2)]
    length = len(prompts[0])
    records = [of_prompt(0, prompts[0], prompt_tokens=100, cached_tokens=0)]
    records.append(of_prompt(1, prompts[1], prompt_tokens=100, cached_tokens=cached))
    found = attainable(made_run(records).records)
    first_most = 100 * min(256, length) / length
    second_most = 100 * min(256 * (strides + 1), length) / length
    assert found.most_tokens == pytest.approx(first_most + second_most)
    assert found.is_exceeded == (cached > first_most + second_most + 0.02 * 200)
    if found.achieved_share is not None and not found.is_exceeded:
        assert found.achieved_share <= 1
