"""Answers over HTTP do not depend on whether the backend takes one step or two."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.backend.sim import SimBackend
from tests.engine.loop.two_in_flight import TwoInFlight
from tests.engine.server.conftest import FAST, SLOW, Engine, Start, wait_until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "many choices", "max_tokens": 20, "n": 3, "seed": 1}),
    (TEXT, {"prompt": ["one", "two"], "max_tokens": 9, "temperature": 0, "logprobs": 2, "seed": 2}),
    (TEXT, {"prompt": "penalised", "max_tokens": 12, "presence_penalty": 1.0, "seed": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "hello " * 400}], "max_tokens": 5, "seed": 4}),
]


def essence(body: dict[str, Any]) -> Any:
    return body["choices"], body["usage"]["completion_tokens"]


def holds_nothing(engine: Engine) -> bool:
    return engine.held_blocks() == 0


async def both(start: Start, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the answers of an engine with one step in flight and of an engine with two."""
    bodies = []
    for backend in (SimBackend(FAST, 300), TwoInFlight(SimBackend(FAST, 300))):
        async with start(backend=backend) as engine:
            status, body = await engine.ask(path, **fields)
            assert status == 200
            await wait_until(partial(holds_nothing, engine))
        bodies.append(body)
    assert isinstance(backend, TwoInFlight)
    assert backend.pending or "presence_penalty" in fields
    return bodies


@pytest.mark.parametrize(("path", "fields"), BODIES)
async def test_answers_are_the_same(start: Start, path: str, fields: dict[str, Any]) -> None:
    one, two = await both(start, path, **fields)
    assert essence(one) == essence(two)


async def test_a_stop_string_ends_the_same_text(start: Start) -> None:
    asked = {"prompt": "stop", "seed": 5, "max_tokens": 200}
    (whole, _) = await both(start, TEXT, **asked)
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 3 : len(text) // 3 + 3]
    for body in await both(start, TEXT, **asked, stop=stop):
        assert body["choices"][0]["text"] == text[: text.index(stop)]
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_a_client_that_leaves_frees_its_blocks(start: Start) -> None:
    async with start(backend=TwoInFlight(SimBackend(SLOW, 300))) as engine:
        await leave(engine)
        await wait_until(lambda: engine.held_blocks() == 0 and not engine.service.scheduler.has_work)
        status, _ = await engine.ask(TEXT, prompt="still here", max_tokens=3)
        assert status == 200


async def leave(engine: Engine) -> None:
    async with engine.post(TEXT, prompt="a long story", max_tokens=3000, stream=True) as response:
        await response.content.readany()
        assert engine.held_blocks() > 0
