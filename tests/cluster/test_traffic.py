"""The traffic of the cluster tests distinguishes whole, cut and lost requests. Those tests' verdicts depend on that."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from engine.contract import headers
from tests.cluster.traffic import Outcome, traffic

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"pod x broke off"}}\n\n'


async def serve(request: web.Request, how: str) -> web.StreamResponse:
    assert request.transport is not None
    if how == "503":
        return web.Response(status=503, text="no engine")
    if how == "closed at once":
        request.transport.abort()
        return web.Response()
    response = web.StreamResponse(headers={headers.POD: "pod-1", "Content-Type": "text/event-stream"})
    await response.prepare(request)
    if how == "closed after the head":
        request.transport.abort()
        return response
    await response.write(EVENT[:20])
    await asyncio.sleep(0.001)
    await response.write(EVENT[20:])
    if how == "broken":
        request.transport.abort()
        return response
    if how == "error event":
        await response.write(ERROR)
    elif how == "whole":
        await response.write(DONE)
    await response.write_eof()
    return response


@pytest.mark.parametrize(
    ("how", "outcome", "detail"),
    [
        ("whole", Outcome.WHOLE, ""),
        ("503", Outcome.LOST, "status 503: no engine"),
        ("closed at once", Outcome.LOST, "Disconnected"),
        ("closed after the head", Outcome.LOST, "Error"),
        ("broken", Outcome.CUT, "Error"),
        ("error event", Outcome.CUT, "pod x broke off"),
        ("an end without [DONE]", Outcome.CUT, ""),
    ],
)
async def test_requests_are_told_apart(how: str, outcome: Outcome, detail: str) -> None:
    app = web.Application()

    async def handle(request: web.Request) -> web.StreamResponse:
        return await serve(request, how)

    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with traffic(url, rate=200) as journal, asyncio.timeout(20):
            while len(journal.records) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await runner.cleanup()
    assert {record.outcome for record in journal.records} == {outcome}
    assert all(detail in record.detail for record in journal.records)
    assert len(journal.of(outcome)) == journal.outcomes()[outcome] == len(journal.records)
    if outcome is not Outcome.LOST:
        assert journal.pods() == {"pod-1"}
        assert journal.first_byte_from("pod-1") is not None


async def test_nobody_listens() -> None:
    async with traffic("http://127.0.0.1:9", rate=200) as journal, asyncio.timeout(20):
        while len(journal.records) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert set(journal.outcomes()) == {Outcome.LOST}
