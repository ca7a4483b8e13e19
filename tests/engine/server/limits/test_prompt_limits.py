"""Prompts that are refused before they are tokenized."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import orjson
import pytest

from engine.server.requests import MAX_CHOICES
from engine.text.tokenizer import PART_CHARS, Encoded, Tokenizer
from tests.engine.server.conftest import Engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = "a b " * 5 * 2**20


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which every tokenized text is added."""
    texts: list[str] = []
    encode = Tokenizer.encode

    def spy(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoded:
        texts.append(text)
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    return texts


async def ask(engine: Engine, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a large body."""
    async with engine.http.post(engine.url + path, data=io.BytesIO(orjson.dumps(fields))) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": HUGE}, "prompt"),
        (TEXT, {"prompt": [HUGE]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ("/tokenize", {"prompt": HUGE}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
    ],
)
async def test_a_prompt_of_20_megabytes_is_not_tokenized(
    engine: Engine, encoded: list[str], path: str, fields: dict[str, Any], param: str
) -> None:
    status, body = await ask(engine, path, fields)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "context_length_exceeded")
    assert encoded == []


async def test_if_there_are_too_many_prompts_none_is_tokenized(engine: Engine, encoded: list[str]) -> None:
    for fields in ({"prompt": ["a"] * 100_000}, {"prompt": ["a"] * (MAX_CHOICES // 2 + 1), "n": 2}):
        status, body = await engine.ask(TEXT, **fields)
        assert (status, body["error"]["param"]) == (400, "n")
    assert encoded == []
    assert (await engine.ask(TEXT, prompt=["a"] * MAX_CHOICES, max_tokens=1))[0] == 200
    assert len(encoded) == MAX_CHOICES


@pytest.fixture
def wide(engine: Engine) -> Engine:
    """Return the engine with a context of 131,072 tokens."""
    service = engine.service
    engine.state.service = replace(service, model=replace(service.model, max_model_len=2**17))
    return engine


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        (TEXT, "prompt", {}),
        (TEXT, "answer_so_far", {"prompt": "a"}),
        ("/tokenize", "prompt", {}),
    ],
)
async def test_of_a_text_with_far_too_many_tokens_only_the_beginning_is_tokenized(
    wide: Engine, encoded: list[str], path: str, field: str, fields: dict[str, Any]
) -> None:
    text = "q1" * (wide.service.model.tokenizer.most_bytes(2**17) // 2)
    status, body = await ask(wide, path, {**fields, field: text})
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, field, "context_length_exceeded")
    assert sum(map(len, encoded)) < 2 * PART_CHARS + 10 < len(text)


async def test_a_text_of_long_tokens_is_tokenized_whole(wide: Engine) -> None:
    tokenizer = wide.service.model.tokenizer
    longest = max((tokenizer.decode([i]) for i in range(tokenizer.vocab_size)), key=len)
    text = longest * (9 * 2**17 // len(longest))
    assert len(text) > 8 * 2**17
    status, body = await ask(wide, "/tokenize", {"prompt": text})
    assert (status, body.get("count")) == (200, len(text) // len(longest)), body


async def test_more_tokens_than_the_context_holds_are_not_decoded(engine: Engine) -> None:
    most = engine.service.model.max_model_len
    status, body = await engine.ask("/detokenize", tokens=[10] * (most + 1))
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "tokens", "context_length_exceeded")
    assert (await engine.ask("/detokenize", tokens=[10] * most))[0] == 200
