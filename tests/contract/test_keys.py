"""Prefix keys: the stored vectors, an independent reading of the definition, and the chain's properties."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat, key_seed, prefix_keys
from engine.contract.requests import Endpoint, parse_body, request_head
from tests.contract.make_vectors import CASES, VECTORS

STORED = json.loads(VECTORS.read_text())


def canonical_by_the_book(endpoint: str, request: dict[str, Any]) -> bytes:
    """The definition in the README, written again without looking at the implementation."""
    if endpoint == "/v1/completions":
        prompt = request["prompt"]
        if isinstance(prompt, str):
            return prompt.encode()
        if isinstance(prompt[0], str):
            return prompt[0].encode()
        return struct.pack(f"<{len(prompt)}i", *prompt)

    def compact(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()

    out = compact(request["tools"]) if request.get("tools") else b""
    for message in request["messages"]:
        out += message["role"].encode() + b"\x1f"
        content = message["content"]
        for part in (
            [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
        ):
            out += part["text"].encode() if part["type"] == "text" else compact(part)
        rest = {k: v for k, v in message.items() if k not in ("role", "content")}
        out += (b"\x1f" + compact(rest) if rest else b"") + b"\x1e"
    return out


@pytest.mark.parametrize("vector", STORED, ids=[v["name"] for v in STORED])
def test_vectors_hold_and_follow_the_definition(vector: dict[str, Any]):
    head = request_head(Endpoint(vector["endpoint"]), vector["request"])
    assert head.canonical.hex() == vector["canonical_hex"]
    assert head.canonical == canonical_by_the_book(vector["endpoint"], vector["request"])
    names = (vector["request"]["model"], "", vector["request"].get("cache_salt", ""))
    seed = xxhash.xxh3_64("\x1f".join(names).encode()).intdigest()
    assert f"{seed:016x}" == vector["seed"] == f"{key_seed(*names):016x}"
    chain = []
    for i in range(len(head.canonical) // vector["stride"]):
        seed = xxhash.xxh3_64(head.canonical[i * vector["stride"] : (i + 1) * vector["stride"]], seed=seed).intdigest()
        chain.append(f"{seed:016x}")
    assert chain == vector["keys"]
    assert chain == [f"{key:016x}" for key in prefix_keys(head.canonical, int(vector["seed"], 16), vector["stride"])]


def test_every_case_has_a_vector():
    assert [v["name"] for v in STORED] == [case[0] for case in CASES]
    assert sum(len(v["keys"]) for v in STORED) > 20


@given(
    common=st.binary(max_size=900),
    a=st.binary(max_size=600),
    b=st.binary(max_size=600),
    stride=st.sampled_from([16, 64, 256]),
)
def test_keys_agree_exactly_on_the_common_strides(common: bytes, a: bytes, b: bytes, stride: int):
    left, right = common + a, common + b
    shared = 0
    while left[: (shared + 1) * stride] == right[: (shared + 1) * stride] and (shared + 1) * stride <= min(
        len(left), len(right)
    ):
        shared += 1
    keys_left, keys_right = prefix_keys(left, 7, stride), prefix_keys(right, 7, stride)
    assert len(keys_left) == len(left) // stride
    assert keys_left[:shared] == keys_right[:shared]
    assert all(x != y for x, y in zip(keys_left[shared:], keys_right[shared:], strict=False))


@given(st.text(max_size=40), st.text(max_size=40))
def test_model_and_salt_separate_the_chains(model: str, salt: str):
    base = key_seed(model, "", salt)
    assert base != key_seed(model + "x", "", salt)
    assert base != key_seed(model, "", salt + "x")
    assert base != key_seed(model, "adapter", salt)


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=300)), min_size=1, max_size=6)
)
def test_a_follow_up_turn_extends_the_prefix(turns: list[tuple[str, str]]):
    messages = [{"role": role, "content": text} for role, text in turns]
    shorter, longer = canonical_chat(messages[:-1]), canonical_chat(messages)
    assert longer.startswith(shorter)
    keys = prefix_keys(longer, 1, 64)
    assert keys[: len(shorter) // 64] == prefix_keys(shorter, 1, 64)


def test_text_parts_equal_the_same_text_in_one_string():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert canonical_chat([{"role": "user", "content": parts}]) == canonical_chat(
        [{"role": "user", "content": "one two"}]
    )


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        (Endpoint.CHAT, {}, "messages"),
        (Endpoint.CHAT, {"messages": []}, "messages"),
        (Endpoint.CHAT, {"messages": "hi"}, "messages"),
        (Endpoint.CHAT, {"messages": ["hi"]}, "messages[0]"),
        (Endpoint.CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}], "model": 3}, "model"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": "yes"}, "stream"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}], "cache_salt": 1}, "cache_salt"),
        (Endpoint.COMPLETIONS, {}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": []}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": 5}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": [1, "x"]}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": [2**31]}, "prompt"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused_by_name(endpoint: Endpoint, fields: dict[str, Any], param: str):
    with pytest.raises(BadRequest) as refused:
        request_head(endpoint, fields)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes):
    with pytest.raises(BadRequest):
        parse_body(body)
