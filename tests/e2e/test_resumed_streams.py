"""Engines are killed under streams of real engines with a real checkpoint: the text is that of an undisturbed run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.contract import headers
from engine.contract.requests import Endpoint
from engine.contract.sse import SseDecoder
from engine.text.tokenizer import Tokenizer
from router.parts import FLEET
from tests.e2e.programs import Program, running
from tests.e2e.stack import Stack, gateway_before
from tests.redis_server import running_redis
from tests.router.gateway.helpers import eventually

STREAMS = 16
TOKENS = 200
BIAS = 8.0


def words(checkpoint: Path) -> dict[str, float]:
    """A bias to tokens that are whole words: like a trained model, this one then writes the tokens that its tokenizer
    makes of its text. Random weights alone would write any."""
    tokenizer = Tokenizer.from_path(checkpoint)
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    chosen = [i for i, text in texts.items() if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
    return dict.fromkeys(map(str, chosen[-400:]), BIAS)


def asked(number: int, bias: dict[str, float]) -> tuple[Endpoint, dict[str, Any]]:
    """Chats and completions, greedy ones and ones drawn by a seed."""
    text = f"Question {number}: what does page {number} of the handbook say about restarts?"
    how = {"temperature": 0.0} if number % 2 else {"seed": number}
    shared = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "logit_bias": bias, "stream": True}
    shared |= {**how, "stream_options": {"include_usage": True}}
    if number % 4 < 2:
        return Endpoint.CHAT, {"messages": [{"role": "user", "content": text}], **shared}
    return Endpoint.COMPLETIONS, {"prompt": text, **shared}


@dataclass(slots=True)
class Reading:
    """One stream as its client reads it."""

    number: int
    pieces: list[str] = field(default_factory=list)
    pod: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    async def read(self, stack: Stack, bias: dict[str, float]) -> None:
        """To its end. Fails for a stream that does not end as it should."""
        endpoint, body = asked(self.number, bias)
        decoder = SseDecoder()
        async with stack.http.post(stack.gateway + endpoint, json=body) as answer:
            assert answer.status == 200, await answer.text()
            self.pod = answer.headers[headers.POD]
            async for chunk in answer.content.iter_any():
                for data in decoder.feed(chunk):
                    self._take(data)
        assert self.is_done

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = orjson.loads(data)
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.pieces += [choice["text"] if "text" in choice else choice["delta"].get("content") or ""]


async def read_all(stack: Stack, bias: dict[str, float], victim: Program | None = None) -> list[Reading]:
    """Every stream, read to its end. The victim is killed when one of its streams has begun and has not ended."""
    readings = [Reading(number) for number in range(STREAMS)]
    calls = [asyncio.create_task(reading.read(stack, bias)) for reading in readings]
    if victim is not None:
        pods = {pod.url: pod.pod_id for pod in stack.app[FLEET].answering()}
        on_it = lambda reading: reading.pod == pods.get(victim.url) and reading.pieces and not reading.is_done  # noqa: E731
        await eventually(lambda: any(map(on_it, readings)) or all(call.done() for call in calls), 60)
        victim.process.kill()
    await asyncio.gather(*calls)
    return readings


@pytest.mark.timeout(180)
async def test_a_killed_engine_changes_no_text(tiny_checkpoint: Path) -> None:
    flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "cpu", "--threads", "1"]
    bias = words(tiny_checkpoint)
    with running_redis() as redis:
        engines = [Program("engine", *flags, "--port", "0", "--redis-url", redis.url) for _ in range(2)]
        with running(engines):
            async with gateway_before(redis, engines, policy="round_robin") as stack:
                whole = await read_all(stack, bias)
                assert len({reading.text for reading in whole}) == STREAMS
                for reading, before in zip(await read_all(stack, bias, engines[0]), whole, strict=True):
                    assert reading.text == before.text
                    assert reading.usage["completion_tokens"] == before.usage["completion_tokens"] == TOKENS
                    assert reading.usage["prompt_tokens"] == before.usage["prompt_tokens"]
                assert all(pod.in_flight == 0 for pod in stack.app[FLEET].pods("tiny"))
                if not await metric(stack, 'warmroute_gateway_broken_attempts_total{then="resumed"}'):
                    pytest.skip("the engine had sent all of its streams before it was killed")


async def metric(stack: Stack, name: str) -> float:
    """A counter of the gateway."""
    async with stack.http.get(f"{stack.admin}/metrics") as answer:
        return next(float(line.split()[-1]) for line in (await answer.text()).splitlines() if line.startswith(name))
