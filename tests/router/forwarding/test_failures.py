"""What a client gets when pods fail; nothing stays counted afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from engine.common.sse import DONE, SseDecoder
from engine.contract.keys import key_seed, prefix_keys
from engine.contract.requests import Endpoint
from router.endpoints.stored_responses import STORED
from router.reading.by_load import BY_LOAD, UPLOADS
from router.startup.parts import FLEET, INDEX
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    cuts_body,
    dies_after,
    drops,
    event,
    eventually,
    running,
    stalls_after,
    streams,
)

STREAM = {"model": "m", "prompt": "x" * 600, "stream": True}
WHOLE = {"model": "m", "prompt": "x" * 600}
GOOD = [event("fine"), b"data: [DONE]\n\n"]
GAP_S = 0.005


def last_error(answer: Answer) -> dict[str, object]:
    """Return the error in the last event of a stream, which must consist of whole events."""
    assert answer.body.endswith(b"\n\n")
    events = [orjson.loads(data) for data in SseDecoder().feed(answer.body)]
    assert all("choices" in e for e in events[:-1])
    return dict(events[-1]["error"])


async def wait_quiet(gateway: Gateway, *engines: ScriptedEngine) -> None:
    """Wait until nothing is in flight, and no speculation is left about requests that did not run."""
    await eventually(lambda: gateway.in_flight == 0 and not any(engine.open for engine in engines))


@pytest.mark.parametrize("policy", ["round_robin", "predicted_ttft", "bounded_hash", "affinity_groups"])
@pytest.mark.parametrize(
    ("bad", "reason", "count"),
    [
        (drops, "disconnect", 1),
        (dies_after([]), "disconnect", 1),
        (answers(500), "status", 1),
        (answers(503), "status", 2),
        (answers(429), "status", 2),
        (stalls_after(begin=False), "timeout", 2),
        (stalls_after(), "timeout", 2),
    ],
    ids=["drop", "head then drop", "500", "503", "429", "silence", "head then silence"],
)
async def test_a_failure_before_the_first_byte_goes_to_another_pod(
    bad: Script, reason: str, count: int, policy: str
) -> None:
    pods = [ScriptedEngine("a", bad), ScriptedEngine("b", streams(GOOD)), ScriptedEngine("c", bad)][: 1 + count]
    settings: dict[str, Any] = {"policy": policy, "first_byte_timeout_s": 0.15, "eject_after": 10}
    async with running(*pods, **settings) as gateway:
        replies = [await gateway.post(STREAM) for _ in range(3)]
        text = (await gateway.get("/metrics")).body.decode()
        await wait_quiet(gateway, *pods)
        keys = prefix_keys(b"x" * 600, key_seed("m"))
        held = gateway.app[INDEX].match(keys, asyncio.get_running_loop().time())
    assert [(r.status, r.pod, r.body) for r in replies] == [(200, "b", b"".join(GOOD))] * 3
    assert set(held) == {"b"}
    if policy == "round_robin":
        assert f'warmroute_gateway_retries_total{{reason="{reason}"}}' in text


@pytest.mark.parametrize("bad", [drops, cuts_body, answers(500)], ids=["drop", "half a body", "500"])
async def test_a_whole_answer_is_retried_as_long_as_nothing_was_sent(bad: Script) -> None:
    pods = [ScriptedEngine("a", bad), ScriptedEngine("b", answers(200, b'{"ok": 1}'))]
    async with running(*pods, eject_after=10) as gateway:
        assert [(await gateway.post(WHOLE)).body for _ in range(2)] == [b'{"ok": 1}'] * 2


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize("fields", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_a_refusal_is_no_prefill(status: int, fields: dict[str, Any]) -> None:
    """A pod that refuses at once has not computed 50,000 tokens at infinite speed, and holds none of them."""
    refused = {**fields, "prompt": "x" * 200_000}
    engine = ScriptedEngine("a", answers(status))
    async with running(engine, policy="predicted_ttft") as gateway:
        (pod,) = gateway.app[FLEET].pods("m")
        before = pod.state.cost
        replies = [await gateway.post(refused) for _ in range(6)]
        after = pod.state.cost
        held = gateway.app[INDEX].match(prefix_keys(b"x" * 200_000, key_seed("m")), asyncio.get_running_loop().time())
        await wait_quiet(gateway, engine)
    assert {reply.status for reply in replies} == {status}
    assert after == before
    assert not held


async def test_a_refusal_leaves_the_queue_behind_as_it_was() -> None:
    async def play(request: web.Request) -> web.StreamResponse:
        return await (stalls_after(begin=False) if b"slow" in await request.read() else answers(400))(request)

    engine = ScriptedEngine("a", play)
    async with running(engine) as gateway:
        (pod,) = gateway.app[FLEET].pods("m")
        slow = asyncio.create_task(gateway.post({**STREAM, "prompt": "slow" * 50_000}))
        await eventually(lambda: engine.open == 1)
        before = pod.state.load(asyncio.get_running_loop().time())
        await asyncio.sleep(0.1)
        assert (await gateway.post(STREAM)).status == 400
        after = pod.state.load(asyncio.get_running_loop().time())
        slow.cancel()
    assert after.in_flight == before.in_flight == 1
    assert after.queue_s == pytest.approx(before.queue_s - 0.1, abs=0.05), "the slow prefill began anew"


async def test_one_hung_pod_does_not_take_all_the_time_of_a_whole_answer() -> None:
    hung, good = ScriptedEngine("a", stalls_after(begin=False)), ScriptedEngine("b", answers(200, b'{"ok": 1}'))
    async with running(hung, good, total_timeout_s=2.0) as gateway:
        replies = await asyncio.gather(*(gateway.post(WHOLE) for _ in range(2)))
        await eventually(lambda: hung.open == 0, 0.5)  # the attempt that was given up does not go on
        text = (await gateway.get("/metrics")).body.decode()
    assert [(reply.status, reply.pod) for reply in replies] == [(200, "b")] * 2
    assert len(hung.received) == 1
    assert 'warmroute_gateway_retries_total{reason="timeout"} 1.0' in text


@pytest.mark.parametrize(("pods", "retries"), [(1, 2), (2, 0)], ids=["no other pod", "no retry"])
async def test_a_whole_answer_that_nobody_else_can_give_may_take_all_the_time(pods: int, retries: int) -> None:
    async def play(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1.2)
        return web.Response(body=b"{}")

    engines = [ScriptedEngine(name, play) for name in "ab"[:pods]]
    async with running(*engines, total_timeout_s=2.0, retries=retries) as gateway:
        assert (await gateway.post(WHOLE)).status == 200
    assert sum(len(engine.received) for engine in engines) == 1


async def test_a_failed_pod_is_not_tried_twice_and_the_retries_are_bounded() -> None:
    pods = [ScriptedEngine(name, answers(503)) for name in "abcd"]
    async with running(*pods, retries=2) as gateway:
        await gateway.post(STREAM)
    assert sorted(len(pod.received) for pod in pods) == [0, 1, 1, 1]


async def test_when_every_pod_answers_an_error_the_last_one_is_passed_on() -> None:
    body = b'{"error": {"message": "full"}}'
    pods = [ScriptedEngine(name, answers(503, body, extra={"Retry-After": "7"})) for name in "ab"]
    async with running(*pods) as gateway:
        answer = await gateway.post(STREAM)
    assert (answer.status, answer.body, answer.headers["Retry-After"]) == (503, body, "7")


@pytest.mark.parametrize(
    ("bad", "status", "kind"),
    [
        (drops, 502, "upstream_error"),
        (cuts_body, 502, "upstream_error"),
        (stalls_after(begin=False), 504, "timeout_error"),
    ],
    ids=["drop", "half a body", "silence"],
)
async def test_when_no_pod_answers_the_client_gets_an_openai_error(bad: Script, status: int, kind: str) -> None:
    pods = [ScriptedEngine(name, bad) for name in "ab"]
    # A pod that is only slow on a busy machine must not look like one that is silent.
    total_s = 0.3 if status == 504 else 60.0
    async with running(*pods, total_timeout_s=total_s, eject_after=100) as gateway:
        answer = await gateway.post(WHOLE)
        await wait_quiet(gateway, *pods)
    assert answer.status == status
    assert answer.json["error"]["type"] == kind
    assert answer.json["error"]["message"]
    assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize(
    "sent",
    [[event("a")], [event("a"), event("b") + b'data: {"choi'], [event("a"), b"data:"]],
    ids=["between events", "within one", "at its start"],
)
async def test_a_death_after_the_first_byte_ends_in_an_error_event(sent: list[bytes]) -> None:
    pods = [ScriptedEngine(name, dies_after(sent)) for name in "ab"]
    async with running(*pods, resume_streams=False) as gateway:
        answer = await gateway.post(STREAM)
        text = (await gateway.get("/metrics")).body.decode()
        await wait_quiet(gateway, *pods)
    assert answer.status == 200
    assert answer.body.startswith(event("a"))
    assert last_error(answer)["type"] == "upstream_error"
    assert not answer.is_whole, "no client may take this for a whole answer, or use the connection again"
    assert sum(len(pod.received) for pod in pods) == 1
    assert "warmroute_gateway_broken_streams_total 1.0" in text


async def test_the_connection_is_closed_after_a_broken_stream() -> None:
    async with running(ScriptedEngine("a", dies_after([event("a")]))) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(STREAM)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(5):
            received = await reader.read()  # to the end of the connection
        writer.close()
    assert b'"upstream_error"' in received


@pytest.mark.parametrize("limit", ["idle_timeout_s", "total_timeout_s"])
async def test_a_silent_stream_ends_in_an_error_event(limit: str) -> None:
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    limits: dict[str, Any] = {limit: 0.2}
    async with running(engine, **limits) as gateway:
        answer = await gateway.post(STREAM)
        await wait_quiet(gateway, engine)
    assert last_error(answer)["type"] == "upstream_error"
    assert not answer.is_whole


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (stalls_after(begin=False), STREAM),
        (stalls_after(), STREAM),
        (stalls_after([event("a")]), STREAM),
        (stalls_after(begin=False), WHOLE),
        (streams([event("a")] * 1000, gap_s=0.005), STREAM),
    ],
    ids=["before the head", "before the body", "within the stream", "whole answer", "while chunks flow"],
)
async def test_a_client_that_leaves_is_noticed_by_the_engine(script: Script, fields: object) -> None:
    engine = ScriptedEngine("a", script)
    async with running(engine) as gateway:
        call = asyncio.create_task(gateway.post(fields))
        await eventually(lambda: engine.open == 1)
        await asyncio.sleep(0.03)
        call.cancel()
        await eventually(lambda: engine.open == 0, 1.0)
        await wait_quiet(gateway, engine)
        text = (await gateway.get("/metrics")).body.decode()
    assert 'status="499"' in text


@pytest.mark.parametrize(
    ("chunks", "turns"), [*((0, turns) for turns in range(0, 45, 3)), *((chunks, 3) for chunks in (1, 2, 3))]
)
async def test_leaving_at_any_moment_leaves_nothing_counted(chunks: int, turns: int) -> None:
    """A client leaves while it connects, while its request is read, while a pod drops it, while it is sent to another
    pod (all in some 30 turns of the loop), or while chunks come."""
    pods = [ScriptedEngine("a", drops), ScriptedEngine("b", streams([event("x")] * 3 + [DONE], gap_s=GAP_S))]
    async with running(*pods, eject_after=100) as gateway:
        calls = [asyncio.create_task(gateway.post(STREAM)) for _ in range(8)]
        await asyncio.sleep(chunks * GAP_S)
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await wait_quiet(gateway, *pods)


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    engine = ScriptedEngine("a", streams([b"data: " + b"y" * 65536 + b"\n\n"] * 400 + [DONE]))
    async with running(engine, idle_timeout_s=0.3) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = orjson.dumps(STREAM)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await eventually(lambda: engine.open == 1)
        await wait_quiet(gateway, engine)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(400 * 65536)
        writer.close()


async def test_a_refused_connection_ejects_the_pod_and_recovery_brings_it_back() -> None:
    pods = [ScriptedEngine("a", streams(GOOD)), ScriptedEngine("b", streams(GOOD))]
    async with running(*pods, eject_after=2) as gateway:
        port = int(pods[0].url.rpartition(":")[2])
        await pods[0].stop()
        for _ in range(4):
            answer = await gateway.post(STREAM)
            assert (answer.status, answer.pod) == (200, "b")
        await gateway.wait_pods(1)
        pods[0].epoch = 2
        await pods[0].start(port)
        await gateway.wait_pods(2)
        assert {(await gateway.post(STREAM)).pod for _ in range(2)} == {"a", "b"}
        assert [pod.epoch for pod in gateway.app[FLEET].pods("m")] == [2, 1]


async def test_without_a_living_pod_the_answer_is_503_and_the_gateway_lives_on() -> None:
    engine = ScriptedEngine("a", streams(GOOD))
    async with running(engine, eject_after=1) as gateway:
        port = int(engine.url.rpartition(":")[2])
        await engine.stop()
        await gateway.wait_pods(0)
        answer = await gateway.post(STREAM)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await gateway.get("/ready")).status == 200, "a gateway without engines still answers clients"
        waiting = await gateway.get("/ready?engines=1")
        assert (waiting.status, waiting.json["missing"]) == (503, ["0 of 1 engines answer"])
        await engine.start(port)
        await gateway.wait_pods(1)
        assert (await gateway.post(STREAM)).status == 200


async def test_many_at_once_with_a_pod_dying_lose_nothing() -> None:
    pods = [ScriptedEngine(name, streams([event("x")] * 5 + GOOD, gap_s=0.002)) for name in "abc"]
    pods.append(ScriptedEngine("d", drops))
    async with running(*pods, policy="least_loaded") as gateway:
        replies = await asyncio.gather(*(gateway.post(STREAM) for _ in range(60)))
        await wait_quiet(gateway, *pods)
    assert {reply.status for reply in replies} == {200}
    assert {reply.body for reply in replies} == {event("x") * 5 + b"".join(GOOD)}


async def test_an_unexpected_error_becomes_a_500_and_the_next_request_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from router.startup.parts import GENERATE

    async with running(ScriptedEngine("a", streams(GOOD))) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(gateway.app[GENERATE]._reading, "read", lambda *a: 1 / 0)
            answer = await gateway.post(STREAM)
        assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
        assert "ZeroDivisionError" in caplog.text
        assert (await gateway.post(STREAM)).status == 200


async def test_an_unused_connection_is_not_shared_with_an_aborted_request() -> None:
    """A cancelled stream's connection must not go back to the pool with bytes of the stream still in it."""
    chunks = [*(event(str(i)) for i in range(50)), DONE]
    engine = ScriptedEngine("a", streams(chunks, gap_s=0.002))
    async with running(engine) as gateway:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await gateway.post(STREAM)
            assert (await gateway.post(STREAM)).body == b"".join(chunks)


async def test_openai_shape_for_a_path_and_a_method_that_do_not_exist() -> None:
    async with running(ScriptedEngine("a", streams(GOOD))) as gateway:
        missing = await gateway.get("/v1/nothing")
        wrong = await gateway.get("/v1/completions")
        assert (missing.status, wrong.status, wrong.headers["Allow"]) == (404, 405, "POST")
        told, _, served = missing.json["error"]["message"].partition("; served here: ")
        assert told == "GET /v1/nothing: 404: Not Found"
        caches = {"/v1/caches", "/v1/caches/{id}"}
        kept = {path for _, path in STORED}
        known = {*Endpoint, *BY_LOAD, *UPLOADS, *caches, *kept, "/v1/models", "/v1/models/{model}", "/health", "/ready"}
        assert known == set(served.split(", "))
        async with aiohttp.ClientSession() as session, session.put(f"{gateway.url}/health") as put:
            assert put.status == 405
