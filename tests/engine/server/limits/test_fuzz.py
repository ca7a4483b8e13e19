"""Any JSON in any field gets an answer in time, and never a 500."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.server.fields import ChatFields, CompletionFields, GenerationFields
from tests.engine.server.conftest import Engine, Start

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, 1, 2, -1, 0.5, "", "a", "user", "hi there", "<|im_end|>", "\x00", "🙂"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)
CALL = st.fixed_dictionaries({"name": TEXT, "arguments": st.dictionaries(TEXT, JSON, max_size=2) | st.just("{}")})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT | PARTS},
    optional={"tool_calls": st.lists(CALL.map(lambda call: {"function": call}), max_size=2), "name": TEXT},
)
FUNCTION = st.fixed_dictionaries({"name": st.just("f"), "description": JSON, "parameters": JSON})
FLAG = st.booleans()
VALID: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=4),
    "prompt": TEXT.filter(bool) | st.lists(st.integers(0, 300), min_size=1, max_size=9),
    "max_tokens": st.integers(1, 4),
    "tools": st.lists(FUNCTION.map(lambda function: {"type": "function", "function": function}), max_size=2),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 2**31),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 10),
    "presence_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3) | st.just("a"),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(1, 3),
    "stream": FLAG,
    "ignore_eos": FLAG,
    "cache_salt": TEXT,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["messages", "bos_token", "x"]), JSON, max_size=2),
}


@st.composite
def bodies(draw: st.DrawFn, kind: type[GenerationFields]) -> dict[str, Any]:
    """Valid fields; in half of the bodies one field has an arbitrary value."""
    needed = ["max_tokens", "messages" if kind is ChatFields else "prompt"]
    optional = sorted(VALID.keys() & kind.model_fields.keys() - {*needed})
    names = needed + draw(st.lists(st.sampled_from(optional), max_size=5, unique=True))
    body = {name: draw(VALID[name]) for name in names}
    if draw(FLAG):
        body[draw(st.sampled_from([*sorted(kind.model_fields), "unknown"]))] = draw(JSON)
    return body


class Client:
    """Runs coroutines on one event loop, which hypothesis' synchronous tests share."""

    def __init__(self, runner: asyncio.Runner, engine: Engine) -> None:
        self._runner = runner
        self._engine = engine

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        async def send() -> tuple[int, bytes]:
            async with self._engine.http.post(self._engine.url + path, data=body) as response:
                return response.status, await response.read()

        return self._runner.run(send())


@pytest.fixture
def client(start: Start) -> Iterator[Client]:
    context = start()
    with asyncio.Runner() as runner:

        async def enter() -> Engine:
            return await context.__aenter__()

        def leave() -> Coroutine[Any, Any, bool | None]:
            return context.__aexit__(None, None, None)

        engine = runner.run(enter())
        try:
            yield Client(runner, engine)
            assert engine.held_blocks() == 0
            assert not engine.service.scheduler.has_work
        finally:
            runner.run(leave())


def check(status: int, answer: bytes) -> None:
    assert status in (200, 400, 404), (status, answer)
    if status == 200 and answer.startswith(b"data: "):
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert orjson.loads(answer)["error" if status != 200 else "choices"]


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=bodies(ChatFields))
def test_chat_bodies(client: Client, body: dict[str, Any]) -> None:
    check(*client.post("/v1/chat/completions", orjson.dumps(body)))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=bodies(CompletionFields))
def test_completion_bodies(client: Client, body: dict[str, Any]) -> None:
    check(*client.post("/v1/completions", orjson.dumps(body)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    body=JSON | st.fixed_dictionaries({}, optional={"prompt": JSON, "messages": JSON, "tokens": JSON, "tools": JSON})
)
def test_tokenize_bodies(client: Client, body: Any) -> None:
    for path in ("/tokenize", "/detokenize"):
        status, answer = client.post(path, orjson.dumps(body))
        assert status in (200, 400), (status, answer)


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
def test_deeply_nested_bodies(client: Client, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for path, field in (
        ("/v1/chat/completions", b"messages"),
        ("/v1/completions", b"prompt"),
        ("/tokenize", b"prompt"),
    ):
        assert client.post(path, b'{"%s": %s}' % (field, nested))[0] == 400
    tool = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % nested
    message = b'{"messages": [{"role": "user", "content": "x"}], "tools": [%s], "max_tokens": 1}' % tool
    assert client.post("/v1/chat/completions", message)[0] in (200, 400)
