"""Gateway and engine agree on prefix keys for every kind of request. The engine holds exactly the keys that the gateway
computes from the bytes, and it reuses what the gateway predicts when the same request comes again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.contract import headers
from engine.contract.keys import key_seed, prefix_keys
from engine.contract.requests import Endpoint, request_head
from tests.e2e.stack import Stack, wait_index_equal

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"lookup_{i}",
            "description": "Looks a thing up — “précis”, 日本",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "enum": ["a", "b"]}}},
        },
    }
    for i in range(2)
]
LONG = "Please read the handbook before you answer. " * 25


def chat(*contents: Any, **more: Any) -> tuple[Endpoint, dict[str, Any]]:
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return Endpoint.CHAT, {"messages": messages, **more}


CASES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "chat": chat("Chat. " + LONG, "What does it say?"),
    "chat with history": chat("History. " + LONG, "What?", "That. " * 80, "And then?"),
    "chat in parts": chat(
        [{"type": "text", "text": "Parts. " + LONG}, {"type": "text", "text": "More of it."}], "And?"
    ),
    "chat with tools": chat("Tools. " + LONG, "Which tool?", tools=TOOLS),
    "chat with white space": chat("  \n Spaces. " + LONG + " \n ", "What?"),
    "chat in Unicode": chat("é" + "日本語のテキスト、🚀 и кириллица. " * 20, "Что?"),
    "completion": (Endpoint.COMPLETIONS, {"prompt": "Completion. " + LONG}),
    "completion in two-byte letters": (Endpoint.COMPLETIONS, {"prompt": "x" + "éà" * 500}),
    "completion in four-byte letters": (Endpoint.COMPLETIONS, {"prompt": "abc" + "🚀🎉" * 200}),
    "token ids": (Endpoint.COMPLETIONS, {"prompt": [5 + (7 * i) % 1500 for i in range(700)]}),
    "responses": (
        Endpoint.RESPONSES,
        {
            "instructions": "Responses. " + LONG,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "What? "}]},
                {"type": "message", "id": "msg_1", "role": "assistant", "content": "That. " * 80},
                {"role": "user", "content": "And then?"},
            ],
        },
    ),
    "with a salt": chat("Salted. " + LONG, "What?", cache_salt="tenant-7"),
}


@pytest.mark.parametrize("name", CASES)
async def test_both_sides_compute_the_same_keys(stack: Stack, name: str) -> None:
    endpoint, fields = CASES[name]
    limit = "max_output_tokens" if endpoint is Endpoint.RESPONSES else "max_tokens"
    fields = {"model": "tiny", limit: 2, **fields}
    head = request_head(endpoint, fields)
    computed = prefix_keys(head.canonical, key_seed("tiny", "", head.salt))
    assert len(computed) >= 4

    first, _ = await ask(stack, endpoint, fields)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    held = set().union(*(await wait_index_equal(stack)).values())
    mine = [key in held for key in computed]
    # The last key may reach into a block that is not full. With tools, a key is held if a later key is.
    assert mine.count(True) >= len(computed) - 1, f"held of {len(computed)} keys: {mine}"
    assert mine == sorted(mine, reverse=True), "the held keys are a prefix"

    again, predicted = await ask(stack, endpoint, fields)
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.8 * again["prompt_tokens"] - 32
    assert 0.5 * cached <= predicted <= 2 * cached, "tokens are estimated from bytes by the model's mean ratio so far"


async def test_another_salt_shares_nothing(stack: Stack) -> None:
    endpoint, fields = chat("For one tenant only. " + LONG, "What?")
    for salt in ("a", "b"):
        usage, predicted = await ask(stack, endpoint, {"model": "tiny", "max_tokens": 2, "cache_salt": salt, **fields})
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert predicted == 0


async def ask(stack: Stack, endpoint: Endpoint, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the usage of the answer, and the cached tokens that the gateway predicted."""
    async with asyncio.timeout(20), stack.http.post(stack.gateway + endpoint, json=fields) as answer:
        body = await answer.json()
        assert answer.status == 200, body
        usage = body["usage"]
        if endpoint is Endpoint.RESPONSES:
            usage = {"prompt_tokens": usage["input_tokens"], "prompt_tokens_details": usage["input_tokens_details"]}
        return usage, int(answer.headers[headers.PREDICTED_CACHED])
