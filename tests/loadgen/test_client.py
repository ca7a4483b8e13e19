"""The client against a scripted server on a real socket."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loadgen.client import ChatCall, ChatClient, RequestRecord, ServerUnusable
from tests.loadgen.scripted_gateway import ScriptedGateway


async def send(
    gateway: ScriptedGateway, *, timeout_s: float = 5.0, late_s: float = 0.0, tokens: int = 4
) -> tuple[RequestRecord, str]:
    async with ChatClient(gateway.url, model="scripted", timeout_s=timeout_s, extra={"ignore_eos": True}) as client:
        now_s = asyncio.get_running_loop().time()
        message = {"role": "user", "content": "one two three"}
        return await client.send(ChatCall(3, 1, 2, [message], tokens, now_s - late_s), policy="least_loaded")


async def test_a_complete_answer_is_timed_and_counted():
    async with ScriptedGateway(gap_s=0.03, token_s=0.005).running() as gateway:
        record, text = await send(gateway)
    assert text == "w0 w1 w2 w3 "
    assert (record.session, record.turn, record.tenant) == (3, 1, 2)
    assert record.failure is None
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (8, 0, 4)
    assert record.policy == "least_loaded"
    assert record.pod.startswith("pod-")
    assert len(record.gaps_s) == 3
    assert min(record.gaps_s) > 0.01
    assert record.first_token_s is not None
    assert record.first_token_s - record.sent_s >= 0.04  # prefill of 8 tokens; the empty role chunk does not count
    assert record.first_token_s + sum(record.gaps_s) <= record.finished_s


async def test_what_is_sent():
    async with ScriptedGateway().running() as gateway:
        await send(gateway)
    assert gateway.log == [("chat", "least_loaded")]
    assert gateway.bodies[0] == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_time_counts_from_the_intended_moment():
    async with ScriptedGateway().running() as gateway:
        record, _ = await send(gateway, late_s=3.0)
    assert record.first_token_s is not None
    assert record.sent_s - record.intended_s == pytest.approx(3.0, abs=0.5)
    assert record.first_token_s - record.intended_s > 3.0


@pytest.mark.parametrize(
    ("fault", "label"),
    [
        ("http 429", "http 429"),
        ("http 503", "http 503"),
        ("truncate", "truncated"),
        ("error event", "error event"),
        ("nonsense", "bad answer"),
        ("drop", "disconnected"),
    ],
)
async def test_each_failure_has_its_label(fault: str, label: str):
    async with ScriptedGateway(fault=lambda body: fault).running() as gateway:
        record, _ = await send(gateway)
    assert record.failure == label
    assert record.detail
    assert record.finished_s >= record.sent_s


async def test_the_deadline_bounds_a_stalled_stream():
    async with ScriptedGateway(fault=lambda body: "stall").running() as gateway:
        record, text = await send(gateway, timeout_s=0.2)
    assert record.failure == "timeout"
    assert record.finished_s - record.sent_s == pytest.approx(0.2, abs=0.15)
    assert text == "w0 "


async def test_nobody_listening():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gateway = ScriptedGateway(url=f"http://127.0.0.1:{port}")
    record, _ = await send(gateway)
    assert record.failure == "connect"
    async with ChatClient(gateway.url) as client:
        with pytest.raises(ServerUnusable, match="v1/models"):
            await client.model_id()
        assert "Connect" in (await client.reset_prefix_cache() or "")


async def test_model_id_and_reset():
    async with ScriptedGateway().running() as gateway, ChatClient(gateway.url) as client:
        assert await client.model_id() == "scripted"
        assert await client.reset_prefix_cache() is None
        gateway.allows_reset = False
        assert await client.reset_prefix_cache() == "HTTP 404 no such endpoint"
