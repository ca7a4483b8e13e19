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
from engine.contract.keys import MEDIA_BYTES, canonical_chat, key_seed, media_parts, prefix_keys
from engine.contract.requests import Endpoint, parse_body, request_head
from tests.engine.contract.make_vectors import CASES, VECTORS

STORED = json.loads(VECTORS.read_text())


def canonical_by_the_book(endpoint: str, request: dict[str, Any]) -> bytes:
    """The definition in PREFIX_KEYS.md, written again without looking at the implementation."""
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
            if part["type"] == "text":
                out += part["text"].encode()
            elif part["type"] in ("input_text", "output_text", "refusal", "thinking"):
                out += compact(part)
            else:
                out += xxhash.xxh3_128(compact(part)).hexdigest().encode() * 128
        rest = {k: v for k, v in message.items() if k not in ("role", "content")}
        out += (b"\x1f" + compact(rest) if rest else b"") + b"\x1e"
    return out


@pytest.mark.parametrize("vector", STORED, ids=[v["name"] for v in STORED])
def test_vectors_hold_and_follow_the_definition(vector: dict[str, Any]) -> None:
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


def test_every_case_has_a_vector() -> None:
    assert [v["name"] for v in STORED] == [case[0] for case in CASES]
    assert sum(len(v["keys"]) for v in STORED) > 20


@given(
    common=st.binary(max_size=900),
    a=st.binary(max_size=600),
    b=st.binary(max_size=600),
    stride=st.sampled_from([16, 64, 256]),
)
def test_keys_agree_exactly_on_the_common_strides(common: bytes, a: bytes, b: bytes, stride: int) -> None:
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
def test_model_and_salt_separate_the_chains(model: str, salt: str) -> None:
    base = key_seed(model, "", salt)
    assert base != key_seed(model + "x", "", salt)
    assert base != key_seed(model, "", salt + "x")
    assert base != key_seed(model, "adapter", salt)


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=300)), min_size=1, max_size=6)
)
def test_a_follow_up_turn_extends_the_prefix(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    shorter, longer = canonical_chat(messages[:-1]), canonical_chat(messages)
    assert longer.startswith(shorter)
    keys = prefix_keys(longer, 1, 64)
    assert keys[: len(shorter) // 64] == prefix_keys(shorter, 1, 64)


def test_text_parts_equal_the_same_text_in_one_string() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert canonical_chat([{"role": "user", "content": parts}]) == canonical_chat(
        [{"role": "user", "content": "one two"}]
    )


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    "part",
    [
        image("data:image/png;base64," + "A" * 2_000_000),
        {"type": "input_audio", "input_audio": {"data": "A" * 50_000, "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"image_url": {"url": "https://example.com/1.png"}},
        {"type": ["image_url"]},
    ],
    ids=["image", "audio", "file", "no type", "strange type"],
)
def test_media_takes_the_same_room_however_large_it_is(part: dict[str, Any]) -> None:
    def canonical(*parts: dict[str, Any]) -> bytes:
        return canonical_chat([{"role": "user", "content": list(parts)}])

    text = {"type": "text", "text": "What is this?"}
    assert len(canonical(text, part)) - len(canonical(text)) == MEDIA_BYTES
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [text, part, part]},
    ]
    assert (media_parts(messages), media_parts(messages[:1])) == (2, 0)


def test_keys_differ_from_the_first_image_that_differs() -> None:
    def keys(url: str) -> tuple[int, ...]:
        parts = [{"type": "text", "text": "x" * 1019}, image(url), {"type": "text", "text": "y" * 600}]
        return prefix_keys(canonical_chat([{"role": "user", "content": parts}]), 7)

    one, again, other = keys("A" * 10_000 + "B"), keys("A" * 10_000 + "B"), keys("A" * 10_000 + "C")
    assert len(one) == (1024 + MEDIA_BYTES + 600) // 256
    assert one == again
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": nested(300), "messages": [{"role": "user", "content": "x"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "name": "n", "tool_calls": nested(300)}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": nested(300)}]}]}, "content[0]"),
    ],
)
def test_what_is_nested_too_deeply_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    parsed = parse_body(json.dumps(fields).encode())
    with pytest.raises(BadRequest) as refused:
        request_head(Endpoint.CHAT, parsed)
    assert refused.value.param == (param if param == "tools" else f"messages[0].{param}")


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
)
def test_a_wrong_type_is_refused_by_name(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request_head(endpoint, fields)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_body(body)
