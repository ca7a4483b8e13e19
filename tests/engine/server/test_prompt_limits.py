"""Prompts that are refused before they are tokenized."""

from __future__ import annotations

import io
from typing import Any

import orjson
import pytest

from engine.server.requests import MAX_CHOICES
from engine.text.tokenizer import Encoded, Tokenizer
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
    async with engine.http.post(engine.url + path, data=io.BytesIO(orjson.dumps(fields))) as response:
        status, body = response.status, await response.json()
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "context_length_exceeded")
    assert encoded == []


async def test_if_there_are_too_many_prompts_none_is_tokenized(engine: Engine, encoded: list[str]) -> None:
    for fields in ({"prompt": ["a"] * 100_000}, {"prompt": ["a"] * (MAX_CHOICES // 2 + 1), "n": 2}):
        status, body = await engine.ask(TEXT, **fields)
        assert (status, body["error"]["param"]) == (400, "n")
    assert encoded == []
    assert (await engine.ask(TEXT, prompt=["a"] * MAX_CHOICES, max_tokens=1))[0] == 200
    assert len(encoded) == MAX_CHOICES


async def test_more_tokens_than_the_context_holds_are_not_decoded(engine: Engine) -> None:
    most = engine.service.model.max_model_len
    status, body = await engine.ask("/detokenize", tokens=[10] * (most + 1))
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "tokens", "context_length_exceeded")
    assert (await engine.ask("/detokenize", tokens=[10] * most))[0] == 200
