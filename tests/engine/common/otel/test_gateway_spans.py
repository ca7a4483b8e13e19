"""Spans of the gateway: one for each request, one for each attempt, joined with the client's and the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engine.common.otel.sampling import Sampling
from engine.common.otel.tracer import Span, SpanKind, Tracer
from router.startup.parts import ROOM
from router.telemetry.log import REQUESTS
from tests.router.rig.helpers import (
    ScriptedEngine,
    answers,
    drops,
    event,
    eventually,
    running,
    stalls_after,
    streams,
    usage_event,
)
from tests.router.rig.storyteller import WORDS, Gate, Storyteller, asked, read, story

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
SECRET = "the words of a prompt"
STREAM = {"model": "m", "prompt": SECRET, "max_tokens": 4, "stream": True}
TOLD = [event("a"), event("b"), usage_event(10, 2, 4), b"data: [DONE]\n\n"]


class Seen(list[Span]):
    """The spans of a test's gateways. A test may set `sampling` before it starts a gateway."""

    sampling = Sampling()

    def request(self) -> Span:
        (own,) = [span for span in self if span.kind is SpanKind.SERVER]
        return own

    def attempts(self) -> list[Span]:
        """Return the attempts' spans by start. Each must be a child of the request's span, and lie within its time."""
        own = self.request()
        found = sorted((span for span in self if span.kind is SpanKind.CLIENT), key=lambda span: span.start_ns)
        for span in found:
            assert (span.parent_id, span.trace.trace_id) == (own.span_id, own.trace.trace_id)
            assert own.start_ns <= span.start_ns <= span.end_ns <= own.end_ns
        assert len({span.span_id for span in self}) == len(self)
        return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    spans = Seen()

    @contextlib.asynccontextmanager
    async def tracing(service: str) -> AsyncIterator[Tracer]:
        assert service == "warmroute-gateway"
        yield Tracer(spans.sampling, spans.append)

    monkeypatch.setattr("router.forwarding.tracing.tracing", tracing)
    return spans


def parent_of(engine: ScriptedEngine, place: int = 0) -> tuple[int, int, int]:
    """Return the trace id, span id and flags that an engine got."""
    told = engine.received[place].headers.getall("traceparent")
    assert len(told) == 1
    match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", told[0])
    assert match
    return int(match[1], 16), int(match[2], 16), int(match[3], 16)


async def test_a_request_and_its_attempt_say_what_was_decided_and_what_came(seen: Seen) -> None:
    engine = ScriptedEngine("a", streams(TOLD))
    async with running(engine, policy="predicted_ttft") as gateway:
        reply = await gateway.post(STREAM, traceparent=CALLER + "1", tracestate="v=1", **{"x-request-id": "r-1"})
        assert reply.is_whole
        own = seen.request()
        (attempt,) = seen.attempts()
    assert own.trace.trace_id_hex == CALLER[3:35]
    assert (f"{own.parent_id:016x}", own.trace.state, own.name) == (CALLER[36:52], "v=1", "text_completion m")
    assert own.error == attempt.error == ""
    assert own.attributes == own.attributes | {
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "warmroute.request_id": "r-1",
        "warmroute.tenant": "default",
        "warmroute.policy": "predicted_ttft",
        "warmroute.pod": "a",
        "warmroute.cached_tokens.predicted": 0,
        "warmroute.attempts": 1,
        "warmroute.breaks": 0,
        "warmroute.queue_s": 0.0,
    }
    for span in (own, attempt):
        assert 0 <= float(str(span.attributes["warmroute.ttft.actual_s"])) <= (own.end_ns - own.start_ns) / 1e9 + 1e-6
        assert float(str(span.attributes["warmroute.ttft.predicted_s"])) > 0
    assert attempt.attributes["warmroute.outcome"] == "answered"
    assert parent_of(engine)[:2] == (own.trace.trace_id, attempt.span_id)
    assert engine.received[0].headers.getall("tracestate") == ["v=1"]


@pytest.mark.parametrize("sent", [{}, {"traceparent": "00-nonsense", "tracestate": "v=1"}])
async def test_a_request_of_nobodys_trace_begins_one(seen: Seen, sent: dict[str, str]) -> None:
    engine = ScriptedEngine("a", streams(TOLD))
    async with running(engine) as gateway:
        await gateway.post(STREAM, **sent)
        await gateway.post(STREAM, **sent)
    first, second = [span for span in seen if span.kind is SpanKind.SERVER]
    assert first.parent_id == second.parent_id == 0
    assert first.trace.trace_id != second.trace.trace_id
    assert "tracestate" not in engine.received[0].headers
    assert parent_of(engine)[0] == first.trace.trace_id


async def test_a_request_that_is_not_sampled_leaves_no_span_and_says_so_on(seen: Seen) -> None:
    seen.sampling = Sampling(0.0)
    engine = ScriptedEngine("a", streams(TOLD))
    async with running(engine) as gateway:
        await gateway.post(STREAM)
        await gateway.post(STREAM, traceparent=CALLER + "0")
        await gateway.post(STREAM, traceparent=CALLER + "1")
    assert [parent_of(engine, i)[2] & 1 for i in range(3)] == [0, 0, 1]
    assert parent_of(engine, 1)[0] == int(CALLER[3:35], 16)
    assert {span.trace.trace_id_hex for span in seen} == {CALLER[3:35]}


async def test_without_tracing_a_clients_own_headers_pass_untouched() -> None:
    engine = ScriptedEngine("a", streams(TOLD))
    async with running(engine) as gateway:
        await gateway.post(STREAM, traceparent="anything", tracestate="v=1")
    got = engine.received[0].headers
    assert (got.getall("traceparent"), got.getall("tracestate")) == (["anything"], ["v=1"])


async def test_a_request_that_is_tried_again_has_a_span_for_each_attempt(seen: Seen) -> None:
    engines = [ScriptedEngine("a", drops), ScriptedEngine("b", answers(503)), ScriptedEngine("c", streams(TOLD))]
    async with running(*engines) as gateway:
        assert (await gateway.post(STREAM)).status == 200
        assert seen.request().error == ""
        assert seen.request().attributes["warmroute.attempts"] == len(seen.attempts())
        failed, last = seen.attempts()[:-1], seen.attempts()[-1]
    by_pod = {engine.pod: engine for engine in engines}
    for span in seen.attempts():
        assert parent_of(by_pod[str(span.attributes["warmroute.pod"])])[:2] == (span.trace.trace_id, span.span_id)
    assert [span.error for span in failed] == [
        {"a": "disconnect", "b": "status"}[str(span.attributes["warmroute.pod"])] for span in failed
    ]
    assert (last.error, last.attributes["warmroute.outcome"]) == ("", "answered")


async def test_a_hedged_request_has_both_attempts(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.overload.hedges.HEDGED_ONE_IN", 1)
    order: list[ScriptedEngine] = []
    engines = [ScriptedEngine(name, drops) for name in "ab"]

    def script(engine: ScriptedEngine) -> Any:
        async def play(request: web.Request) -> web.StreamResponse:
            order.append(engine)
            return await (stalls_after(begin=False) if len(order) == 1 else streams(TOLD))(request)

        return play

    for engine in engines:
        engine.script = script(engine)
    async with running(*engines, hedge_after_s=0.02, eject_after=10) as gateway:
        assert (await gateway.post(STREAM)).status == 200
    first, second = seen.attempts()
    assert [span.attributes["warmroute.pod"] for span in (first, second)] == [engine.pod for engine in order]
    assert (first.attributes["warmroute.outcome"], first.error) == ("cancelled", "")
    assert (second.attributes["warmroute.outcome"], second.error) == ("answered", "")
    assert [parent_of(engine)[1] for engine in order] == [first.span_id, second.span_id]
    assert seen.request().attributes["warmroute.pod"] == order[1].pod


async def test_a_stream_that_survives_its_pod_has_both_attempts(seen: Seen) -> None:
    gate = Gate(lambda number: WORDS // 2)
    engines = [Storyteller(name, "warmroute", gate.wait) for name in "ab"]
    async with running(*engines) as gateway:
        call = asyncio.create_task(gateway.post(asked(3), traceparent=CALLER + "1"))
        await eventually(lambda: gate.waiting == 1)
        broken = next(engine for engine in engines if engine.open)
        await broken.stop()
        gate.open()
        assert read((await call).body, "/v1/completions")["text"] == "".join(story(3))  # type: ignore[arg-type]
    first, second = seen.attempts()
    assert first.attributes["warmroute.pod"] == broken.pod
    assert (first.error, second.error, seen.request().error) == ("broken", "", "")
    assert seen.request().attributes["warmroute.breaks"] == 1
    assert f"{seen.request().parent_id:016x}" == CALLER[36:52]


async def test_what_fails_says_so_in_a_word_and_not_in_an_engines_words(seen: Seen) -> None:
    said = b'{"error": {"message": "cannot read: %b"}}' % SECRET.encode()
    async with running(ScriptedEngine("a", answers(500, said)), retries=0) as gateway:
        assert (await gateway.post(STREAM)).status == 500
        assert (seen.request().error, seen.attempts()[0].error) == ("500", "status")
        seen.clear()
        assert (await gateway.post({**STREAM, "model": "no such model"})).status == 404
        own = seen.request()
        assert (own.error, own.name, own.attributes["http.response.status_code"]) == ("", "text_completion", 404)
        seen.clear()
        assert (await gateway.post(b"no JSON")).status == 400
        assert seen.request().attributes["http.response.status_code"] == 400


async def test_a_client_that_leaves_is_told_from_a_failure(seen: Seen) -> None:
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    async with running(engine) as gateway:
        async with gateway.session.post(f"{gateway.url}/v1/completions", json=STREAM) as reply:
            await reply.content.readany()
        await eventually(lambda: bool(seen))
        assert seen.request().attributes["http.response.status_code"] == 499
        assert [span.error for span in seen] == ["client_gone", "client_gone"]


async def test_log_line_and_spans_know_each_other_and_hold_no_prompt_and_no_key(
    seen: Seen, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger(REQUESTS)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    key = "sk-of-a-tenant-1234567890"
    (tmp_path / "keys").write_text(f"{key}\n")
    engine = ScriptedEngine("a", streams(TOLD))
    async with running(engine, api_keys_file=str(tmp_path / "keys")) as gateway:
        more = {"Authorization": f"Bearer {key}", "x-session-id": SECRET}
        assert (await gateway.post(STREAM, traceparent=CALLER + "1", **more)).status == 200
        engine.script = answers(400, SECRET.encode())
        assert (await gateway.post(STREAM, traceparent=CALLER + "0", **more)).status == 400
    lines = [record.message for record in caplog.records if record.name == REQUESTS]
    for text in (repr(seen), *lines):
        assert SECRET not in text
        assert key not in text
    first, second = map(json.loads, lines)
    assert first["trace_id"] == second["trace_id"] == seen.request().trace.trace_id_hex
    assert first["key_id"] == hashlib.sha256(key.encode()).hexdigest()[:12]
    assert (first["client"], first["queue_ms"]) == ("127.0.0.1", 0)
    assert (first["prompt_tokens"], first["completion_tokens"], first["cached_tokens"]) == (10, 2, 4)
    assert datetime.fromisoformat(first["time"]).tzinfo is not None


async def test_a_request_that_waits_says_how_long(seen: Seen) -> None:
    release = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await streams(TOLD)(request)

    async with running(ScriptedEngine("a", waits), max_pod_requests=1) as gateway:
        calls = [asyncio.create_task(gateway.post(STREAM)) for _ in range(2)]
        await eventually(lambda: sum(gateway.app[ROOM].waiting().values()) == 1)
        await asyncio.sleep(0.02)
        release.set()
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200, 200]
    waited = sorted(float(str(span.attributes["warmroute.queue_s"])) for span in seen if span.kind is SpanKind.SERVER)
    assert waited[0] == 0 < waited[1]
