"""Fields that the gateway sets in a body; everything else stays unchanged."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.errors import BadRequest
from router.reading import fields
from router.reading.fields import MAX_FIELDS, with_fields

NAMES = st.sampled_from(["cache_salt", "cache_sal", '"cache_salt', "model", "", "ü", "a\\", "}"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=5
)
NUMBERS = st.sampled_from(["0", "-0.0", "1e300", "1" * 300, "0.1000000000000000055", "1E+2", "-12"])
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SPACE = st.sampled_from(["", " ", "\n\t", "\r\n "])


def spelt(text: str, escaped: frozenset[int], ascii_only: bool) -> str:
    """`text` as a JSON string with some of its characters as \\u escapes."""
    parts = [
        f"\\u{ord(char):04x}"
        if at in escaped and ord(char) < 0x10000
        else json.dumps(char, ensure_ascii=ascii_only)[1:-1]
        for at, char in enumerate(text)
    ]
    return f'"{"".join(parts)}"'


SPELT = st.builds(spelt, STRINGS, st.frozensets(st.integers(0, 8)), st.booleans())
SPELT_NAMES = st.builds(lambda n, e, a: (n, spelt(n, e, a)), NAMES, st.frozensets(st.integers(0, 12)), st.booleans())
VALUES = st.recursive(
    NUMBERS | SPELT | st.sampled_from(["true", "null", "[]", "{}", "[ ]"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{' , '.join(items)}]")
        | st.lists(st.tuples(SPELT_NAMES, inner), max_size=3).map(
            lambda fields: f"{{{', '.join(f'{name[1]} :{value}' for name, value in fields)}}}"
        )
    ),
    max_leaves=6,
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[list[tuple[str, str]], bytes]:
    """Fields as (name, the text of its value), and the body that has them."""
    fields = draw(st.lists(st.tuples(SPELT_NAMES, VALUES), max_size=6))
    space = [draw(SPACE) for _ in range(5)]
    members = [f"{space[0]}{name[1]}{space[1]}:{space[2]}{value}{space[3]}" for name, value in fields]
    return [
        (name[0], value) for name, value in fields
    ], f"{space[4]}{{{','.join(members) or space[0]}}}{space[0]}".encode()


def pairs(body: bytes) -> list[tuple[str, Any]]:
    """Return every top-level field, in order, with numbers as they are written."""
    found: list[list[tuple[str, Any]]] = []

    def note(fields: list[tuple[str, Any]]) -> Any:
        found.append(fields)
        return tuple(fields)

    json.loads(body, object_pairs_hook=note, parse_int=str, parse_float=str, strict=False)
    return found[-1]


@given(
    objects(),
    st.dictionaries(
        st.sampled_from(["cache_salt", "priority"]), STRINGS | st.integers(-(2**63), 2**64 - 1), min_size=1
    ),
    st.booleans(),
)
def test_the_new_fields_are_there_once_and_all_others_as_they_came(
    made: tuple[list[tuple[str, str]], bytes], new: dict[str, str | int], is_large: bool
) -> None:
    _, body = made
    present = orjson.loads(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "FREE_BYTES", 0 if is_large else len(body))
        result = with_fields(body, present, new)
    as_written = {name: str(value) if isinstance(value, int) else value for name, value in new.items()}
    assert pairs(result) == [*as_written.items(), *(pair for pair in pairs(body) if pair[0] not in new)]
    assert orjson.loads(result) == {**present, **new}


@given(objects())
def test_if_nothing_is_replaced_the_old_body_is_a_tail_of_the_new_one(
    made: tuple[list[tuple[str, str]], bytes],
) -> None:
    _, body = made
    present = {**orjson.loads(body)}
    if "priority" not in present:
        result = with_fields(body, present, {"priority": 3})
        assert re.sub(rb'"priority":3,?', b"", result, count=1) == body


def test_text_that_looks_like_the_field_is_left_alone() -> None:
    body = (
        b'{"messages":[{"cache_salt":"inner"}],"x":"\\"cache_salt\\":1, }","cache\\u005fsalt":"m","y":{"cache_salt":2}}'
    )
    result = with_fields(body, orjson.loads(body), {"cache_salt": "s"})
    assert result == (
        b'{"cache_salt":"s","messages":[{"cache_salt":"inner"}],"x":"\\"cache_salt\\":1, }","y":{"cache_salt":2}}'
    )


def test_what_takes_long_to_look_at_is_refused() -> None:
    many = b"{" + b",".join(b'"a%d":1' % number for number in range(MAX_FIELDS)) + b',"cache_salt":"x"}'
    with pytest.raises(BadRequest, match="more than 1000 fields"):
        with_fields(many, {"cache_salt"}, {"cache_salt": "s"})
    assert with_fields(many, set("a"), {"cache_salt": "s"}).endswith(many[1:])
    deep = b'{"cache_salt":"x","a":' + b"[" * 900 + b"]" * 900 + b"}"
    with_fields(deep, {"a"}, {"cache_salt": "s"})
    assert orjson.loads(with_fields(deep, {"a", "cache_salt"}, {"cache_salt": "s"}))["cache_salt"] == "s"


def test_the_memory_of_a_large_body_is_its_bytes_alone() -> None:
    body = b'{"model":"m","cache_salt":"x","a":[' + b"[]," * 2**20 + b"1]}"
    tracemalloc.start()
    try:
        assert with_fields(body, {"model", "cache_salt", "a"}, {"cache_salt": "s"}).startswith(b'{"cache_salt":"s"')
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(body), peak
