"""Streams on the wire: the order of events, the time of the headers, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from engine.backend.sim import SimBackend
from engine.common.sse import SseDecoder
from engine.contract import headers
from engine.sched.plan import StepPlan, StepResult
from engine.sched.scheduler import TokenOutput
from engine.server.choices import AnswerChoice, Delta
from tests.engine.server.conftest import FAST, MODEL, SLOW, Engine, Start, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    decoder = SseDecoder()
    async for data in response.content.iter_any():
        for event in decoder.feed(data):
            yield event if event == b"[DONE]" else orjson.loads(event)


class Failing(SimBackend):
    """Fails in the given steps, counted from 1."""

    def __init__(self, *failing: int) -> None:
        super().__init__(FAST, 300)
        self._failing = failing
        self._steps = 0

    async def run(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        if self._steps in self._failing:
            raise RuntimeError("device lost")
        return await super().run(plan)


async def test_order_of_the_events_of_a_chat(engine: Engine) -> None:
    async with engine.post(
        CHAT, messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
    ) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *chunks, finish, usage, done = [event async for event in events_of(response)]
    assert done == b"[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in chunks[1:])
    assert all(chunk["usage"] is None for chunk in [*chunks, finish])
    assert {chunk["id"] for chunk in [*chunks, finish, usage]} == {usage["id"]}
    assert {chunk["object"] for chunk in [*chunks, finish, usage]} == {"chat.completion.chunk"}


async def test_usage_is_not_sent_unless_asked_for(engine: Engine) -> None:
    async with engine.post(TEXT, prompt="hi", stream=True) as response:
        events = [event async for event in events_of(response)]
    assert all("usage" not in event for event in events[:-1])
    assert all(event["object"] == "text_completion" for event in events[:-1])


@pytest.mark.parametrize("stream", [True, False])
async def test_headers_go_out_with_the_first_token_and_not_before(start: Start, stream: bool) -> None:
    """Until then a gateway may try another engine."""
    async with start(replace(SLOW, w0_ms=100)) as engine:
        await engine.ask(TEXT, prompt=list(range(64)), max_tokens=1)
        started_s = time.perf_counter()
        async with engine.post(TEXT, prompt=list(range(64)), max_tokens=2, stream=stream, model=MODEL) as response:
            assert time.perf_counter() - started_s > 0.09
            assert response.headers[headers.CACHED] == "63"
            assert response.headers[headers.PROMPT_TOKENS] == "64"
            assert response.headers[headers.POD] == "pod-1"
            await response.read()
        assert time.perf_counter() - started_s > 0.19


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks_within_a_step(start: Start, stream: bool) -> None:
    async with start(SLOW) as engine:
        request = asyncio.ensure_future(
            engine.post(TEXT, prompt="hi " * 50, max_tokens=3000, n=2, stream=stream).__aenter__()
        )
        await wait_until(lambda: engine.held_blocks() > 0)
        if stream:
            (await request).close()
        else:
            request.cancel()
        left_s = time.perf_counter()
        await wait_until(lambda: engine.held_blocks() == 0)
        assert time.perf_counter() - left_s < 0.02 + 0.1  # a step, and slack for a busy machine
        assert not engine.service.scheduler.has_work


async def test_a_client_that_leaves_before_its_first_token_is_not_computed(start: Start) -> None:
    async with start(SLOW, max_running=1, max_step_tokens=64) as engine:
        first = asyncio.ensure_future(engine.ask(TEXT, prompt="first", max_tokens=20))
        await wait_until(lambda: engine.held_blocks() > 0)
        second = asyncio.ensure_future(engine.ask(TEXT, prompt="second", max_tokens=3000))
        await wait_until(lambda: engine.service.scheduler.load().waiting == 1)
        second.cancel()
        await wait_until(lambda: engine.service.scheduler.load().waiting == 0)
        assert (await first)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_step_that_fails_before_the_first_token_is_a_500(start: Start, stream: bool) -> None:
    async with start(backend=Failing(1)) as engine:
        status, body = await engine.ask(CHAT, messages=MESSAGES, max_tokens=3, stream=stream)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "device lost" in body["error"]["message"]
        assert (await engine.ask(CHAT, messages=MESSAGES, max_tokens=3))[0] == 200
        assert engine.held_blocks() == 0


async def test_a_step_that_fails_later_ends_the_stream_with_an_error_event(start: Start) -> None:
    async with start(backend=Failing(3)) as engine:
        async with engine.post(CHAT, messages=MESSAGES, max_tokens=9, stream=True) as response:
            *chunks, last = [event async for event in events_of(response)]
        assert response.status == 200
        assert chunks
        assert last["error"]["type"] == "server_error"
        assert (await engine.ask("/v1/completions", prompt="x"))[0] == 200


async def test_a_defect_after_the_first_token_breaks_the_connection(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client never gets a silent truncation, nor a second answer inside the first."""
    push = AnswerChoice.push

    def broken(choice: AnswerChoice, output: TokenOutput) -> Delta:
        if choice.completion_tokens == 2:
            raise AssertionError("a defect")
        return push(choice, output)

    monkeypatch.setattr(AnswerChoice, "push", broken)
    async with engine.post(CHAT, messages=MESSAGES, max_tokens=9, stream=True) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await wait_until(lambda: engine.held_blocks() == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_is_dropped(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    monkeypatch.setattr("engine.server.http.wire.WRITE_TIMEOUT_S", 0.2)
    async with start() as engine:
        # 12 MB of log-probabilities: more than the sockets' buffers hold.
        fields = {"max_tokens": 300, "n": 16, "logprobs": True, "top_logprobs": 20, "stream": stream}
        async with engine.post(CHAT, messages=MESSAGES, **fields) as response:
            async with asyncio.timeout(10):
                await engine.state.wait_idle()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # the client's fault, not a defect


@pytest.mark.parametrize("path", ["chat", "health"])
async def test_a_client_that_does_not_read_the_last_bytes_is_dropped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The end of a body waits until the transport has room again, and so does an answer that is sent in one piece."""
    monkeypatch.setattr("engine.server.http.wire.WRITE_TIMEOUT_S", 0.2)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "write_eof", never)
    monkeypatch.setattr(web.Response, "write_eof", never)

    async def ask() -> None:
        if path == "health":
            await engine.http.get(engine.url + "/health")
        else:
            async with engine.post(CHAT, messages=MESSAGES, max_tokens=2, stream=True) as response:
                await response.read()

    with pytest.raises(aiohttp.ClientError):
        await asyncio.wait_for(ask(), 3)
    await asyncio.wait_for(engine.state.wait_idle(), 3)


async def test_an_answer_of_many_slices_comes_whole_to_a_slow_client(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.http.wire.WRITE_TIMEOUT_S", 2.0)
    fields = {"max_tokens": 300, "n": 4, "logprobs": True, "top_logprobs": 20}
    async with engine.post(CHAT, messages=MESSAGES, **fields) as response:
        body = b""
        async for data in response.content.iter_any():
            body += data
            await asyncio.sleep(0.001)
    assert len(body) == int(response.headers["Content-Length"]) > 2**20
    assert len(orjson.loads(body)["choices"]) == 4


async def test_a_stream_of_several_prompts_has_no_counts_in_its_headers(engine: Engine) -> None:
    """At the first token only one prompt's cached tokens are known; the usage at the end has all of them."""
    for prompt, has_counts in (([list(range(64)), list(range(64))], False), ([list(range(64))], True)):
        fields = {"prompt": prompt, "max_tokens": 1, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        async with engine.post(TEXT, **fields) as response:
            *_, usage, _ = [event async for event in events_of(response)]
        assert [name in response.headers for name in (headers.CACHED, headers.PROMPT_TOKENS)] == [has_counts] * 2
        assert usage["usage"]["prompt_tokens"] == 64 * len(prompt)
        if has_counts:
            details = usage["usage"]["prompt_tokens_details"]
            assert response.headers[headers.CACHED] == str(details["cached_tokens"]) == "63"


async def test_more_requests_than_the_queue_holds_get_a_429(start: Start) -> None:
    async with start(SLOW, max_running=1, max_waiting=1, max_step_tokens=64) as engine:
        running = asyncio.ensure_future(engine.ask(TEXT, prompt="a", max_tokens=30))
        await wait_until(lambda: engine.held_blocks() > 0)
        waiting = asyncio.ensure_future(engine.ask(TEXT, prompt="b", max_tokens=1))
        await wait_until(lambda: engine.service.scheduler.load().waiting == 1)
        async with engine.post(TEXT, prompt="c") as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        assert [(await running)[0], (await waiting)[0]] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_cuts_the_text_and_ends_the_request(engine: Engine, stream: bool) -> None:
    fields = {"prompt": "hi", "seed": 4, "max_tokens": 200, "stream": stream}
    _, whole = await engine.ask(TEXT, **{**fields, "stream": False})
    text = whole["choices"][0]["text"]
    stop = text[100:103]
    async with engine.post(TEXT, **fields, stop=[stop]) as response:
        if stream:
            choices = [event["choices"][0] async for event in events_of(response) if event != b"[DONE]"]
            got, finish = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        else:
            body = await response.json()
            got, finish = body["choices"][0]["text"], body["choices"][0]["finish_reason"]
            assert body["usage"]["completion_tokens"] < 200
    assert got == text[: text.index(stop)]
    assert finish == "stop"
    await wait_until(lambda: engine.held_blocks() == 0)


async def test_a_stop_token_ends_the_text_and_is_not_in_it(start: Start) -> None:
    class Counting(SimBackend):
        async def run(self, plan: StepPlan) -> StepResult:
            result = await super().run(plan)
            tokens = {i: replace(token, token=65 + (self.next - 65)) for i, token in result.sampled.items()}
            self.next += bool(tokens)
            return StepResult(tokens, result.elapsed_s)

        next = 65

    async with start(backend=Counting(FAST, 300)) as engine:
        status, body = await engine.ask(TEXT, prompt="hi", max_tokens=50, stop_token_ids=[70])
        _, text = await engine.ask("/detokenize", tokens=[65, 66, 67, 68, 69])
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["text"] == text["prompt"]
    assert body["usage"]["completion_tokens"] == 6


async def test_the_clients_request_id_comes_back(engine: Engine) -> None:
    async with engine.http.get(engine.url + "/health", headers={headers.REQUEST_ID: "abc"}) as response:
        assert response.headers[headers.REQUEST_ID] == "abc"
    async with engine.http.post(
        engine.url + TEXT, json={"prompt": "hi", "stream": True}, headers={headers.REQUEST_ID: "abc"}
    ) as response:
        assert response.headers[headers.REQUEST_ID] == "abc"


async def test_long_prompts_do_not_stop_the_event_loop(engine: Engine) -> None:
    """Half a megabyte of text is parsed, rendered, tokenized and hashed while the loop keeps turning.

    Other work on the machine may stop the loop once, so one of three prompts is enough.
    """
    engine.state.service = replace(engine.service, model=replace(engine.service.model, max_model_len=2**19))
    shares = [await longest_pause(engine, seed) for seed in range(3)]
    assert min(shares) < 0.5, "most of the time is tokenizing, which does not block"


async def longest_pause(engine: Engine, seed: int) -> float:
    """Return the longest pause of the event loop during a request with a long prompt, as a share of its time."""
    draw = random.Random(seed)
    text = " ".join("".join(draw.choices("abcdefghij", k=5)) for _ in range(90_000))
    big = asyncio.ensure_future(engine.ask(CHAT, messages=[{"role": "user", "content": text}], max_tokens=1))
    worst_s, started_s = 0.0, time.perf_counter()
    while not big.done():
        before_s = time.perf_counter()
        await asyncio.sleep(0.001)
        worst_s = max(worst_s, time.perf_counter() - before_s)
    status, body = await big
    assert status == 400
    assert "KV blocks" in body["error"]["message"]
    return worst_s / (time.perf_counter() - started_s)
