"""What the gateway passes on, and what it keeps to itself: headers, engines' addresses, trickled bytes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from multidict import CIMultiDict

from engine.common.sse import DONE
from router.edge.headers import UpstreamHeaders, removed_at_proxy
from router.engines.stream_reader import StreamReader
from router.engines.usage import Usage
from router.forwarding.relay import Relay
from router.reading.inbound import Reader, Rules
from router.reading.model_ratios import Estimates
from router.reading.names import Models
from router.startup.parts import CHOOSER, FLEET, INDEX
from router.views.types import PodId
from tests.router.forwarding.test_relay import Sink
from tests.router.rig.helpers import (
    ScriptedEngine,
    answers,
    cuts_body,
    dies_after,
    drops,
    event,
    running,
    stalls_after,
    streams,
    usage_event,
)

GOOD = streams([event("fine"), b"data: [DONE]\n\n"])
STREAM = {"model": "m", "prompt": "x" * 600, "stream": True}
WHOLE = {"model": "m", "prompt": "x" * 600}
WHO_ASKS = {
    "Cookie": "session=1",
    "Forwarded": "for=192.0.2.1",
    "X-Forwarded-For": "192.0.2.1",
    "X-Forwarded-Host": "h",
    "X-Forwarded-Proto": "https",
    "X-Real-IP": "192.0.2.1",
}


def test_every_connection_header_is_honoured() -> None:
    sent = CIMultiDict(
        [("Connection", "close, x-one"), ("connection", "X-Two"), ("X-One", "1"), ("X-Two", "2"), ("X", "3")]
    )
    raw = [(name.encode(), value.encode()) for name, value in sent.items()]
    assert (
        UpstreamHeaders(passes_authorization=True).of(raw, "id")
        == b"X: 3\r\naccept-encoding: identity\r\nx-request-id: id\r\n"
    )


async def test_cookies_do_not_pass_and_engines_do_not_learn_which_client_asks() -> None:
    engine = ScriptedEngine("a", answers(200, extra={"Set-Cookie": "a=1; Path=/", "Retry-After": "7"}))
    async with running(engine) as gateway:
        answer = await gateway.post(WHOLE, **WHO_ASKS, **{"X-Kept": "too"})
    (received,) = engine.received
    assert received.headers["X-Kept"] == "too"
    assert not received.headers.keys() & {name for name in received.headers if name.lower() in map(str.lower, WHO_ASKS)}
    assert answer.headers["Retry-After"] == "7"
    assert "Set-Cookie" not in answer.headers


OF_THE_GATEWAY = {
    "X-RateLimit-Limit-Requests": "1",
    "x-ratelimit-remaining-tokens": "0",
    "WWW-Authenticate": "Basic",
    "Alt-Svc": 'h3=":443"',
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Credentials": "true",
    "Strict-Transport-Security": "max-age=1",
    "Content-Security-Policy": "default-src *",
    "Clear-Site-Data": '"cookies"',
    "Set-Cookie2": "a=1",
    "Location": "http://10.0.0.1/",
    "Refresh": "0; url=http://10.0.0.1/",
    "Link": "<http://10.0.0.1/>; rel=preload",
    "Via": "1.1 engine",
    "X-Powered-By": "engine",
    "X-Accel-Redirect": "/secret",
    "X-Sendfile": "/secret",
    "X-Envoy-Upstream-Service-Time": "1",
    "Request-Id": "other",
    "Proxy-Authenticate": "Basic",
    "X-Warmroute-Anything": "x",
    "X-Of-Tomorrow": "x",
}
PASSED = {"Retry-After": "7", "Warning": '199 - "w"', "Cache-Control": "no-store", "Content-Language": "en"}


@pytest.mark.parametrize("status", [200, 400, 429])
async def test_clients_get_listed_headers_of_an_engine_alone(status: int) -> None:
    script = answers(status, b'{"choices":[]}', extra={**OF_THE_GATEWAY, **PASSED, "Server": "uvicorn"})
    async with running(ScriptedEngine("a", script)) as gateway:
        answer = await gateway.post(WHOLE)
        assert answer.status == status
        assert {name: answer.headers.get(name) for name in PASSED} == PASSED
        assert not [name for name in OF_THE_GATEWAY if name in answer.headers]
        assert "uvicorn" not in answer.headers.get("Server", "")
    names = {name.lower() for name in OF_THE_GATEWAY} - {"x-envoy-upstream-service-time", "proxy-authenticate"}
    framing = {":status", "content-length", "transfer-encoding", "date", "content-type"}
    assert removed_at_proxy([*OF_THE_GATEWAY, *PASSED, *framing]) == names, "and so through the picker"


BROKEN = {
    "drops": (drops, WHOLE, 502),
    "cuts": (cuts_body, WHOLE, 502),
    "is silent": (stalls_after(begin=False), STREAM, 504),
    "sends an empty stream": (streams([]), STREAM, 502),
    "breaks a stream": (dies_after([event("a")]), STREAM, 200),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_clients_are_not_told_where_engines_are(how: str) -> None:
    script, ask, status = BROKEN[how]
    engine = ScriptedEngine(None, script)  # an engine without an id is named by its address
    async with running(engine, first_byte_timeout_s=0.2, retries=0) as gateway:
        answer = await gateway.post(ask)
    assert answer.status == status
    assert b'"error"' in answer.body
    assert engine.url.removeprefix("http://").encode() not in answer.body
    assert b"127.0.0.1" not in answer.body


async def test_an_engine_that_is_gone_is_not_named_either(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = ScriptedEngine(None, GOOD)
    async with running(engine, probe_interval_s=60, eject_after=100, retries=0) as gateway:
        await engine.stop()
        answer = await gateway.post(STREAM)
    assert answer.status == 502
    assert b"127.0.0.1" not in answer.body
    assert engine.url.removeprefix("http://") in caplog.text, "the log says where it was"


class Trickle:
    """Sends byte by byte."""

    is_read = False

    def __init__(self, size: int) -> None:
        self._rest = iter([b"x"] * size + [b"\n", b"\n"])

    async def readany(self) -> bytes:
        return next(self._rest, b"")


def seconds_to_relay(size: int) -> float:
    """Return the CPU time of one event that comes byte by byte."""

    async def run() -> float:
        source: Any = Trickle(size)
        sink: Any = Sink()
        deadline_s = asyncio.get_running_loop().time() + 600
        relay = Relay(source, sink, reader=StreamReader("/v1/unknown"), idle_s=60, deadline_s=deadline_s)
        began_s = time.process_time()
        await relay.copy(b"data: ")
        assert sink.data == b"data: " + b"x" * size + b"\n\n"
        return time.process_time() - began_s

    return asyncio.run(run())


def test_trickled_bytes_cost_in_proportion() -> None:
    """Eight times the bytes cost 8 times as much. They would cost 64 times as much if each byte caused a full scan."""
    short_s = min(seconds_to_relay(25_000) for _ in range(3))
    long_s = min(seconds_to_relay(200_000) for _ in range(2))
    assert long_s < 30 * short_s


async def test_what_a_pod_teaches_after_it_has_left_is_not_remembered() -> None:
    """Otherwise the pod's slot in the index would never be freed."""
    engine = ScriptedEngine("a", streams([event("x")] * 3 + [usage_event(150, 3, 0), DONE], gap_s=0.15))
    other = ScriptedEngine("b", GOOD)
    async with running(engine, other, policy="round_robin", stride_bytes=16) as gateway:
        index, chooser = gateway.app[INDEX], gateway.app[CHOOSER]
        (leaving,) = (pod for pod in gateway.app[FLEET].pods("m") if pod.pod_id == "a")
        for _ in range(2):  # after these requests, the pods are believed warm
            await gateway.post(STREAM)
        inbound = gateway_inbound(gateway)
        choice = chooser.explain(inbound)[0]
        choice.pod, choice.strides = leaving, len(inbound.keys)
        roster = gateway.app[FLEET]._roster
        roster.drop(leaving.pod_id)
        index.drop(leaving.pod_id)
        chooser.learn(inbound, choice, Usage(150, 3, 0, is_final=True))
        held = index.held(PodId("a"))
        roster.put(leaving, answers=True)
    assert not any(held.values())
    assert PodId("a") not in index._slots


def gateway_inbound(gateway: Any) -> Any:
    reader = Reader(Models(gateway.app[FLEET]), Estimates(), None, Rules(16, "cache_aware", None))
    return reader.read(None, orjson.dumps(STREAM), {})
