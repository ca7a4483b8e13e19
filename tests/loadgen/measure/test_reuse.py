"""What could have been reused: against a cache that is a set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.keys import DEFAULT_STRIDE_BYTES, prefix_keys
from loadgen.measure.reuse import STRIDE_BYTES, attainable
from loadgen.measure.summary import summarise
from tests.loadgen.measure.builders import failed, made_run, request


def test_strides_are_those_of_the_keys():
    assert STRIDE_BYTES == DEFAULT_STRIDE_BYTES


def of_prompt(number: int, prompt: bytes, **fields: object):
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
def test_attainable_is_what_an_infinite_shared_cache_finds(sent: list[bytes], cached: int):
    seen: set[bytes] = set()
    expected, wasted = 0.0, 0.0
    for prompt in sent:
        held = [prompt[: i * 256] for i in range(1, len(prompt) // 256 + 1)]
        hits = sum(part in seen for part in held)
        could = hits * 256 / len(prompt) * 100
        expected += could
        wasted += max(0.0, could - cached)
        seen |= set(held)
    records = [of_prompt(i, prompt, prompt_tokens=100, cached_tokens=cached) for i, prompt in enumerate(sent)]
    # The order in which requests end does not matter, the order of sending does.
    found = attainable(made_run(records[::-1]).records)
    assert found.prompt_tokens == 100 * len(sent), "prompts without a whole stride count, with nothing to find"
    assert found.attainable_tokens == pytest.approx(expected)
    assert found.duplicated_tokens == pytest.approx(wasted)


def test_a_failed_request_may_have_filled_the_cache_but_is_not_counted():
    prompt = b"x" * 256 * 4
    first = failed(0, prompt_bytes=len(prompt), prefix_keys=prefix_keys(prompt, 7))
    found = summarise(made_run([first, of_prompt(1, prompt, prompt_tokens=200, cached_tokens=150)])).reuse
    assert found.attainable_rate == 1.0
    assert found.achieved_share == 0.75
    assert found.duplicated_prefill_tokens == 50


def test_whole_prompts_sent_again_are_counted():
    run = made_run([request(i, prompt_hash=h) for i, h in enumerate([5, 6, 5, 5, 0, 0])])
    assert summarise(run).reuse.duplicate_prompts == 2


def test_nothing_shared_and_nothing_known():
    alone = made_run([of_prompt(i, bytes([65 + i]) * 512) for i in range(3)])
    assert attainable(alone.records).rate == 0
    assert summarise(alone).reuse.achieved_share is None
    unknown = summarise(made_run([request()])).reuse
    assert (unknown.attainable_rate, unknown.duplicated_prefill_tokens) == (None, None)
