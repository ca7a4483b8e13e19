"""JSON of others: what it becomes in memory is bounded before anything is built, and the rest is read."""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract import bounded_json
from engine.contract.bounded_json import MAX_NODES, MAX_VALUES, TooManyValues, check, commas_between_fields, loads

STRINGS = st.text(st.sampled_from('ab"\\[]{},: \n\u00e9\U0001f600'), max_size=12)
VALUES = st.recursive(
    st.integers(-5, 5) | st.none() | STRINGS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(STRINGS, inner, max_size=6),
    max_leaves=30,
)
TEXTS = st.builds(
    lambda value, is_ascii, space: json.dumps(value, ensure_ascii=is_ascii, indent=space).encode(),
    VALUES,
    st.booleans(),
    st.sampled_from([None, 1]),
)
SLICES = st.sampled_from([1, 2, 7, 64, 65, 1000])


def counted(value: Any) -> tuple[int, int]:
    """Return the lists, objects and fields of a value, and the commas that separate entries."""
    if not isinstance(value, list | dict):
        return 0, 0
    below = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    fields = len(value) if isinstance(value, dict) else 0
    return 1 + fields + sum(nodes for nodes, _ in below), max(0, len(value) - 1) + sum(commas for _, commas in below)


@given(TEXTS, SLICES, st.integers(-1, 1), st.integers(0, 1))
def test_the_bounds_count_what_is_outside_of_strings(text: bytes, size: int, nodes_off: int, values_off: int) -> None:
    nodes, commas = counted(json.loads(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "SLICE_BYTES", size)
        patch.setattr(bounded_json, "FREE_BYTES", 0)
        patch.setattr(bounded_json, "MAX_NODES", nodes + nodes_off)
        patch.setattr(bounded_json, "MAX_VALUES", commas + 1 - values_off)
        if nodes_off >= 0 and not values_off:
            assert loads(text) == json.loads(text)
        else:
            with pytest.raises(TooManyValues):
                loads(text)


@given(st.dictionaries(STRINGS, VALUES, max_size=6), st.booleans(), st.sampled_from([None, 1]), SLICES)
def test_the_commas_between_fields_are_found(
    value: dict[str, Any], is_ascii: bool, space: int | None, size: int
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=space).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "SLICE_BYTES", size)
        commas = commas_between_fields(text).tolist()
    ends = [text.index(b"{"), *commas, text.rindex(b"}")]
    members = [text[start + 1 : end] for start, end in itertools.pairwise(ends)]
    assert [json.loads(b"{%b}" % member) for member in members if value] == [{name: one} for name, one in value.items()]


def _repeated(piece: bytes, count: int) -> bytes:
    return b"[" + b",".join([piece] * count) + b"]"


KINDS = {
    "numbers": b"[" + b",".join(b"%d" % (1000 + i) for i in range(MAX_VALUES)) + b"]",
    "strings": b"[" + b",".join('"\U0001f600%x"'.encode() % i for i in range(MAX_VALUES)) + b"]",
    "lists": _repeated(b"[]", MAX_NODES - 1),
    "objects": _repeated(b'{"a":1}', (MAX_NODES - 1) // 2),
    "fields": b"{" + b",".join(b'"%x":1' % i for i in range(MAX_NODES - 1)) + b"}",
    "both": b"[" + b",".join([b"[]"] * (MAX_NODES - 1) + [b'"\xc3\xbcx"'] * (MAX_VALUES - MAX_NODES)) + b"]",
}


MOST_MIB = 288
"""Strings beyond Latin-1 take the most: 76 bytes each besides their characters, of up to 4 bytes, and what the parser
reserves. The resident set grows by 91 MiB."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_that_a_text_may_have_stays_small(kind: str) -> None:
    text = KINDS[kind]
    tracemalloc.start()
    try:
        assert loads(text) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_MIB * 2**20, peak
    with pytest.raises(TooManyValues):
        loads(text[:1] + b",".join([text[1:-1]] * 2) + text[-1:])


@pytest.mark.parametrize("piece", [b"[]", b"{}", b'""', b"0", b'{"":0}', b'"\\\\"'])
def test_too_many_values_are_refused_before_they_are_built(piece: bytes) -> None:
    text = _repeated(piece, 2**24 // (len(piece) + 1))
    tracemalloc.start()
    try:
        with pytest.raises(TooManyValues, match="more than 131072 lists, objects and fields"):
            loads(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**23, peak
    began_s = time.thread_time()
    with pytest.raises(TooManyValues):
        check(text)
    assert time.thread_time() - began_s < 0.5  # 0.01 s on an idle core


def test_a_prompt_full_of_brackets_and_commas_is_read() -> None:
    prompt = '{"a": [1, 2, "three\\\\"]}, ' * 400_000
    text = orjson.dumps({"prompt": prompt})
    assert loads(text) == {"prompt": prompt}


def test_nesting_is_bounded_by_the_parser() -> None:
    for depth in (10_000, 2**23):
        with pytest.raises(orjson.JSONDecodeError):
            loads(b"[" * depth + b"]" * depth)
