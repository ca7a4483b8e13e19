"""Engines with a real checkpoint are killed during streams; the text equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.common.sse import SseDecoder
from engine.contract import headers
from engine.contract.requests import Endpoint
from engine.text.tokenizer import Tokenizer
from router.startup.parts import FLEET
from tests.e2e.programs import Program, running
from tests.e2e.stack import Stack, gateway_before
from tests.redis_server import running_redis
from tests.router.rig.helpers import eventually

STREAMS = 16
TOKENS = 100
BIAS = 30.0
"""So large that in all of the streams no token without a bias is chosen."""


def words(checkpoint: Path) -> dict[str, float]:
    """Return a bias towards tokens that are whole words. With the bias, the tokenizer turns the model's text into the
    tokens that the model wrote, as with a trained model. With random weights alone it would often find other tokens."""
    tokenizer = Tokenizer.from_path(checkpoint)
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    chosen = [i for i, text in texts.items() if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
    return dict.fromkeys(map(str, chosen[-400:]), BIAS)


def asked(number: int, bias: dict[str, float]) -> tuple[Endpoint, dict[str, Any]]:
    """Return a request for a stream. The number decides its endpoint, and whether it is greedy or has a seed."""
    text = f"Question {number}: what does page {number} of the handbook say about restarts?"
    how = {"temperature": 0.0} if number % 2 else {"seed": number}
    shared = {"model": "tiny", "ignore_eos": True, "logit_bias": bias, "stream": True, **how}
    limited, counted = {**shared, "max_tokens": TOKENS}, {"stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": text}]
    bodies: list[tuple[Endpoint, dict[str, Any]]] = [
        (Endpoint.CHAT, {"messages": messages, **limited, **counted}),
        (Endpoint.COMPLETIONS, {"prompt": text, **limited, **counted}),
        (Endpoint.MESSAGES, {"messages": messages, **limited}),
        (Endpoint.RESPONSES, {"input": text, **shared, "max_output_tokens": TOKENS}),
    ]
    return bodies[number // 2 % 4]


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
        """Read the stream to its end. Fails if the stream does not end as it should."""
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
        assert event.get("error") is None, event
        if "type" in event:
            self._take_named(event)
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.pieces += [choice["text"] if "text" in choice else choice["delta"].get("content") or ""]

    def _take_named(self, event: dict[str, Any]) -> None:
        """Take an event of `/v1/messages` or `/v1/responses`."""
        assert event["type"] != "error", event
        self.is_done |= event["type"] in ("message_stop", "response.completed", "response.incomplete")
        if event["type"] in ("content_block_delta", "response.output_text.delta"):
            self.pieces.append(event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"])
        usage = event.get("usage") or event.get("response", {}).get("usage")
        if usage:
            read = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
            self.usage = {"completion_tokens": usage["output_tokens"], "prompt_tokens": usage["input_tokens"] + read}


async def read_all(stack: Stack, bias: dict[str, float], victim: Program | None = None) -> list[Reading]:
    """Read every stream to its end; kill the victim when one of its streams has begun and has not ended."""
    readings = [Reading(number) for number in range(STREAMS)]
    calls = [asyncio.create_task(reading.read(stack, bias)) for reading in readings]
    if victim is not None:
        pods = {pod.url: pod.pod_id for pod in stack.app[FLEET].answering()}
        on_it = lambda reading: reading.pod == pods.get(victim.url) and reading.pieces and not reading.is_done  # noqa: E731
        await eventually(lambda: any(map(on_it, readings)) or all(call.done() for call in calls), 60)
        victim.process.kill()
    await asyncio.gather(*calls)
    return readings


@pytest.mark.timeout(300)
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
    """Return a counter of the gateway."""
    async with stack.http.get(f"{stack.admin}/metrics") as answer:
        return next(float(line.split()[-1]) for line in (await answer.text()).splitlines() if line.startswith(name))
