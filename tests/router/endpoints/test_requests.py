"""What the gateway accepts, refuses and reports: bounds, models, policies by header, explain, readiness, admin."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any, get_args

import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster
from yarl import URL

from engine.common.settings import ConfigError
from engine.common.sse import DONE
from engine.contract import headers, resets
from router.choosing.registry_view import NoRegistry
from router.registry.reader import RegistryStatus
from router.routing.policies import POLICY_NAMES
from router.settings.gateway import GatewaySettings
from router.settings.routing import PolicyName
from router.startup.parts import CHOOSER, FLEET, INDEX
from router.telemetry.log import REQUESTS, RequestLog
from tests.router.rig.helpers import (
    Script,
    ScriptedEngine,
    answers,
    dies_after,
    drops,
    event,
    eventually,
    running,
    stalls_after,
    streams,
)

GOOD = streams([event("fine"), b"data: [DONE]\n\n"])
STREAM = {"model": "m", "prompt": "x" * 3000, "stream": True}


@pytest.mark.parametrize(
    ("body", "path", "param"),
    [
        (b"", "/v1/completions", None),
        (b"{", "/v1/completions", None),
        (b"[]", "/v1/completions", None),
        (b'{"model": "m", "prompt": "\xff"}', "/v1/completions", None),
        ({"model": "m"}, "/v1/completions", "prompt"),
        ({"model": "m", "prompt": [1, "a"]}, "/v1/completions", "prompt"),
        ({"model": 1, "prompt": "x"}, "/v1/completions", "model"),
        ({"model": "m", "prompt": "x", "stream": "yes"}, "/v1/completions", "stream"),
        ({"model": "m", "messages": []}, "/v1/chat/completions", "messages"),
        ({"model": "m", "messages": [{"role": "user", "content": 5}]}, "/v1/chat/completions", "messages[0].content"),
        ({"model": "m", "messages": ["hi"]}, "/v1/chat/completions", "messages[0]"),
    ],
)
async def test_bad_input_is_a_400_that_names_the_field(body: object, path: str, param: str | None) -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        answer = await gateway.post(body, path=path)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["param"] == param
    assert answer.headers["X-Request-Id"]
    assert not engine.received


async def test_a_deeply_nested_or_surrogate_body_is_refused_not_crashed_on() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        for body in (
            b"[" * 100_000,
            b'{"prompt": "\\ud800", "model": "m"}',
            b'{"model":"m","prompt":' + b"9" * 5000 + b"}",
        ):
            assert (await gateway.post(body)).status == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/route/explain"])
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"this is no gzip"),
        ("gzip", gzip.compress(orjson.dumps(STREAM))[:-20]),
        ("gzip", gzip.compress(b"{}")[:12] + b"\xff" * 40),
        ("deflate", b"\xff" * 40),
    ],
    ids=["no gzip", "cut", "broken", "no deflate"],
)
async def test_a_body_that_is_not_compressed_as_it_says_is_a_400(
    encoding: str, body: bytes, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        answer = await gateway.post(body, path=path, **{"Content-Encoding": encoding})
        good = await gateway.post(gzip.compress(orjson.dumps(STREAM)), **{"Content-Encoding": "gzip"})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert "\n" not in answer.json["error"]["message"]
    assert (good.status, len(engine.received)) == (200, 1)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"Authorization: Bearer sk-1" + b"c" * 20_000, "more than 8190 bytes"),
        (b"Authorization: Bearer sk-1\x01", "header value"),
        (b"Authorization\x01: Bearer sk-1", "header token"),
        (b"Content-Length: sk-1", "Content-Length"),
    ],
    ids=["long header", "no value", "no name", "no length"],
)
async def test_what_aiohttp_refuses_is_a_line_in_the_log_and_no_traceback(
    sent: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has no header values either, because one may be a key."""
    caplog.set_level("INFO")
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(gateway.url).port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n" + sent + b"\r\n\r\n{}")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.startswith(b"HTTP/1.0 400")
        assert why in answer.decode()
        assert (await gateway.get("/health")).status == 200
    told = [record for record in caplog.records if why in record.getMessage()]
    assert [(record.levelname, record.exc_info) for record in told] == [("INFO", None)]
    assert "Traceback" not in caplog.text
    assert "sk-1" not in caplog.text


@pytest.mark.parametrize("field", ["tools", "messages[0].tool_calls", "messages[0].content[0]"])
async def test_what_can_be_read_but_not_written_is_a_400_that_names_the_field(field: str) -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    deep = json.loads("[" * 300 + "]" * 300)
    fields: dict[str, Any] = {"model": "m", "messages": [message]}
    match field.rpartition(".")[2]:
        case "tools":
            fields["tools"] = deep
        case "tool_calls":
            message["tool_calls"] = deep
        case _:
            message["content"] = [{"type": "file", "file": deep}]
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        answer = await gateway.post(json.dumps(fields).encode(), path="/v1/chat/completions")
    assert (answer.status, answer.json["error"]["param"]) == (400, field)
    assert answer.json["error"]["type"] == "invalid_request_error"


async def test_body_bound() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, max_body_bytes=300_000) as gateway:
        large = await gateway.post({**STREAM, "prompt": "x" * 300_000})
        fitting = await gateway.post({**STREAM, "prompt": "x" * 290_000})
    assert (large.status, large.json["error"]["type"]) == (413, "invalid_request_error")
    assert "300000" in large.json["error"]["message"]
    assert fitting.status == 200
    assert len(engine.received) == 1


async def test_a_megabyte_of_unicode_passes() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        text = "\N{SNOWMAN}\N{GRINNING FACE}" * 150_000
        assert (await gateway.post({**STREAM, "prompt": text})).status == 200
    (received,) = engine.received
    assert orjson.loads(received.body)["prompt"] == text
    assert int(received.headers["Content-Length"]) == len(received.body)
    assert "Content-Disposition" not in received.headers


async def test_in_flight_bound() -> None:
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    async with running(engine, max_in_flight=2) as gateway:
        calls = [asyncio.create_task(gateway.post(STREAM)) for _ in range(2)]
        await eventually(lambda: engine.open == 2)
        answer = await gateway.post(STREAM)
        for call in calls:
            call.cancel()
        await eventually(lambda: gateway.in_flight == 0)
        engine.script = GOOD
        assert (await gateway.post(STREAM)).status == 200
    assert (answer.status, answer.headers["Retry-After"], answer.json["error"]["code"]) == (429, "1", "overloaded")


async def test_each_model_has_its_own_pods() -> None:
    engines = [ScriptedEngine(f"{m}{i}", GOOD, models=[m]) for m in "mn" for i in range(2)]
    async with running(*engines) as gateway:
        for model in "mn":
            pods = {(await gateway.post({**STREAM, "model": model})).pod for _ in range(4)}
            assert pods == {f"{model}0", f"{model}1"}
        missing = await gateway.post({**STREAM, "model": "o"})
        unnamed = await gateway.post({"prompt": "x"})
        models = (await gateway.get("/v1/models")).json
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
    assert (unnamed.status, unnamed.json["error"]["param"]) == (400, "model")
    assert [(m["id"], m["object"]) for m in models["data"]] == [("m", "model"), ("n", "model")]


async def test_a_request_without_a_model_goes_to_the_only_one() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        assert (await gateway.post({"prompt": "x"})).status == 200


async def test_policy_by_header() -> None:
    async with running(ScriptedEngine("a", GOOD), allow_policy_header=True) as gateway:
        for name in POLICY_NAMES:
            answer = await gateway.post(STREAM, **{headers.POLICY: name})
            assert (answer.status, answer.headers[headers.POLICY]) == (200, name)
        unknown = await gateway.post(STREAM, **{headers.POLICY: "best"})
    assert unknown.status == 400
    assert all(name in unknown.json["error"]["message"] for name in POLICY_NAMES)


async def test_policy_by_header_needs_the_flag() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        answer = await gateway.post(STREAM, **{headers.POLICY: "least_loaded"})
    assert answer.status == 400
    assert "--allow-policy-header" in answer.json["error"]["message"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
async def test_explain_shows_every_pod_and_leaves_no_trace(policy: str) -> None:
    engines = [ScriptedEngine(name, GOOD) for name in "ab"]
    chat = {"model": "m", "messages": [{"role": "user", "content": "x" * 3000}]}
    async with running(*engines, policy=policy) as gateway:
        first = await gateway.post(chat, path="/v1/route/explain")
        again = await gateway.post(chat, path="/v1/route/explain")
        really = await gateway.post({**chat, "stream": True}, path="/v1/chat/completions")
        after = await gateway.post(chat, path="/v1/route/explain")
    assert first.status == 200
    assert {k: v for k, v in first.json.items() if k != "pods"} == {k: v for k, v in again.json.items() if k != "pods"}
    assert (first.json["pod"], first.json["policy"]) == (really.pod, policy)
    assert [pod["pod"] for pod in first.json["pods"]] == ["a", "b"]
    assert all(isinstance(pod["score"]["score"], float | int) for pod in first.json["pods"])
    held = {pod["pod"]: pod["view"]["matched_tokens"] for pod in after.json["pods"]}
    assert held[really.pod] > 0
    assert sum(len(engine.received) for engine in engines) == 1


@pytest.mark.parametrize("policy", ["cache_aware", "predicted_ttft", "bounded_hash", "prefix_hash"])
async def test_a_burst_of_one_new_prefix_stays_together(policy: str) -> None:
    engines = [ScriptedEngine(name, streams([event("a"), event("a"), DONE], gap_s=0.001)) for name in "abcd"]
    async with running(*engines, policy=policy) as gateway:
        pods = [(await gateway.post({**STREAM, "prompt": "y" * 6000 + str(i)})).pod for i in range(6)]
    assert len(set(pods)) == 1


async def test_pods_shows_the_fleet() -> None:
    engine = ScriptedEngine("a", GOOD, epoch=2**63)
    async with running(engine) as gateway:
        (pod,) = (await gateway.get("/v1/pods")).json["pods"]
    assert (pod["pod"], pod["url"], pod["models"], pod["epoch"]) == ("a", engine.url, ["m"], str(2**63))
    assert (pod["admitted"], pod["in_flight"], pod["publishes"]) == (True, 0, False)
    assert pod["load"]["in_flight"] == 0


@pytest.mark.parametrize("publishes", [False, True])
async def test_reset_reaches_every_engine_and_empties_what_is_believed(
    publishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoRegistry, "reports", lambda self, pod: publishes)
    engines = [ScriptedEngine(name, GOOD) for name in "ab"]
    async with running(*engines) as gateway:
        await gateway.post(STREAM)
        assert gateway.app[INDEX].statistics().speculative
        answer = await gateway.post(b"", path="/reset_prefix_cache")
        assert (answer.status, answer.json) == (200, {"pods": {"a": "ok", "b": "ok"}})
        assert not gateway.app[INDEX].statistics().speculative
        engines[0].reset_status = 500
        assert (await gateway.post(b"", path="/reset_prefix_cache")).status == 502
    assert [engine.resets for engine in engines] == [2, 2]


async def test_a_reset_that_emptied_nothing_forgets_nothing_and_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """While blocks are in use, vLLM answers 200 and says in the body that it emptied nothing."""
    monkeypatch.setattr(resets, "REPEATED_S", 0.25)
    busy, idle = ScriptedEngine("busy", GOOD), ScriptedEngine("idle", GOOD)
    busy.reset_body, idle.reset_body = b'{"success": false}', b'{"success": true}'
    async with running(busy, idle) as gateway:
        for _ in range(2):
            await gateway.post(STREAM)
        believed = gateway.app[INDEX].statistics().speculative
        answer = await gateway.post(b"", path="/reset_prefix_cache")
        assert answer.status == 502
        assert answer.json["pods"]["idle"] == "ok"
        assert "emptied nothing" in answer.json["pods"]["busy"]
        assert 2 <= busy.resets <= 4
        assert idle.resets == 1
        assert gateway.app[INDEX].statistics().speculative == believed / 2 > 0, "the busy pod is as warm as before"
        busy.reset_body = b'{"success": true}'
        assert (await gateway.post(b"", path="/reset_prefix_cache")).status == 200
        assert not gateway.app[INDEX].statistics().speculative


async def test_health_ready_and_metrics() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        await gateway.post(STREAM)
        assert (await gateway.get("/health")).status == 200
        ready = await gateway.get("/ready")
        text = (await gateway.get("/metrics")).body.decode()
    assert (ready.status, ready.json["pods"]) == (200, {"known": 1, "admitted": 1, "ejected": 0})
    assert 'warmroute_gateway_requests_total{engine="a",policy="round_robin",status="200"} 1.0' in text
    assert 'warmroute_gateway_first_byte_seconds_count{policy="round_robin"} 1.0' in text
    assert "warmroute_gateway_decision_seconds_count 1.0" in text
    assert "warmroute_gateway_in_flight 0.0" in text
    assert "warmroute_gateway_pods_admitted 1.0" in text


async def test_an_engine_without_an_identity_is_not_a_known_pod() -> None:
    class Silent(ScriptedEngine):
        async def _models(self, request: web.Request) -> web.Response:
            return web.Response(status=500)

    async with running(ScriptedEngine("a", GOOD), Silent("b", GOOD), wait=1) as gateway:
        text = (await gateway.get("/metrics")).body.decode()
        known = (await gateway.get("/ready")).json["pods"]
    assert "warmroute_gateway_pods_known 1.0" in text
    assert known == {"known": 2, "admitted": 1, "ejected": 0}, "the pods that discovery found"


async def test_a_model_that_a_pod_lists_twice_has_the_pod_once() -> None:
    async with running(ScriptedEngine("a", GOOD, models=["m", "m"])) as gateway:
        assert len(gateway.app[FLEET].pods("m")) == 1


async def test_unreachable_redis_delays_readiness_only_and_is_visible(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the Redis client reads its own version from disk, once
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, redis_url="redis://127.0.0.1:1", warm_timeout_s=0.3) as gateway:
        assert (await gateway.post(STREAM)).status == 200
        ready = await gateway.get("/ready")
        while ready.status != 200:
            assert ready.json["missing"] == ["the registry is being loaded"]
            await asyncio.sleep(0.02)
            ready = await gateway.get("/ready")
        text = (await gateway.get("/metrics")).body.decode()
    assert ready.json["registry"]["connected"] is False
    assert "Redis" in ready.json["registry"]["last_error"]
    assert "warmroute_gateway_registry_configured 1.0" in text
    assert "warmroute_gateway_registry_connected 0.0" in text


class ExpiredRegistry:
    """A registry whose leases have all run out."""

    expired = True

    def reports(self, pod: str) -> bool:
        return True

    def status(self) -> RegistryStatus:
        return RegistryStatus(True, 1, 0, True, 0, 0, None)


@pytest.mark.parametrize(
    ("asked", "used"),
    [("predicted_ttft", "bounded_hash"), ("cache_aware", "bounded_hash"), ("least_loaded", "least_loaded")],
)
async def test_an_expired_registry_falls_back_and_says_so_once(
    asked: str, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(ScriptedEngine("a", GOOD), policy=asked) as gateway:
        registry: Any = ExpiredRegistry()
        gateway.app[CHOOSER]._registry = registry
        replies = [await gateway.post(STREAM) for _ in range(3)]
        text = (await gateway.get("/metrics")).body.decode()
    assert [(r.status, r.headers[headers.POLICY]) for r in replies] == [(200, used)] * 3
    assert caplog.text.count("registry: expired") == 1
    assert f"warmroute_gateway_registry_fallbacks_total {3.0 if asked != used else 0.0}" in text


async def test_one_json_line_per_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(REQUESTS)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert RequestLog().enabled
    async with running(ScriptedEngine("a", answers(200))) as gateway:
        await gateway.post({"prompt": "x" * 1000}, **{"X-Request-Id": "r1"})
        await gateway.post(b"{", **{"X-Request-Id": "r2"})
    first, second = (json.loads(r.message) for r in caplog.records if r.name == REQUESTS)
    assert (first["request_id"], first["pod"], first["status"], first["error"]) == ("r1", "a", 200, None)
    assert (second["request_id"], second["pod"], second["status"]) == ("r2", "", 400)
    assert "not valid JSON" in second["error"]


@pytest.mark.parametrize(
    ("first", "second", "logged"),
    [
        (drops, GOOD, (200, 0, None)),
        (drops, answers(200), (200, 0, None)),
        (drops, answers(400), (400, 0, None)),
        (drops, answers(500), (500, 0, "the engine answered 500")),
        (dies_after([event("fi"), event("ne")]), streams([event("!"), b"data: [DONE]\n\n"]), (200, 1, None)),
    ],
)
async def test_the_log_has_no_error_of_a_pod_that_another_pod_made_good(
    first: Script,
    second: Script,
    logged: tuple[int, int, str | None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger(REQUESTS)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    scripts = [first, second]

    async def script(request: web.Request) -> web.StreamResponse:
        return await scripts.pop(0)(request)

    async with running(ScriptedEngine("a", script), ScriptedEngine("b", script)) as gateway:
        await gateway.post(STREAM)
    (record,) = (json.loads(r.message) for r in caplog.records if r.name == REQUESTS)
    assert record["attempts"] == 2
    assert (record["status"], record["breaks"], record["error"]) == logged


@pytest.mark.parametrize(
    ("sent", "used"),
    [
        (b"a\xffb", "a?b"),
        ("\N{SNOWMAN}".encode(), "?"),
        (b"tab\tend", "tab?end"),
        (b"x" * 500, "x" * 128),
        (b"~ 1", "~ 1"),
    ],
)
async def test_a_request_id_of_any_bytes_reaches_log_engine_and_client_in_ascii(
    sent: bytes, used: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger(REQUESTS)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    engine = ScriptedEngine("a", answers(200))
    async with running(engine) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        body = orjson.dumps({"prompt": "x"})
        head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (sent, len(body)) + body)
        async with asyncio.timeout(5):
            answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await eventually(lambda: gateway.in_flight == 0)
    (record,) = (json.loads(r.message) for r in caplog.records if r.name == REQUESTS)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert f"x-request-id: {used}\r\n" in answer.decode().lower()
    assert record["request_id"] == engine.received[0].headers["X-Request-Id"] == used


def test_the_policies_of_the_settings_are_the_policies_there_are() -> None:
    assert set(get_args(PolicyName)) == set(POLICY_NAMES)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "one of --engines, --dns-name, --kube-selector, --kube-targets, --inference-pool is required"),
        (["--engines", ""], "--engines"),
        (["--engines", "localhost:8000"], "'localhost:8000'"),
        (["--engines", "http://a:99999"], "http://a:99999"),
        (["--engines", "http://a,http://a/"], "http://a is listed twice"),
        (["--engines", "http://a?x=1"], "query"),
        (["--engines", "http://a", "--redis-url", "http://r"], "redis://"),
        (["--engines", "http://a", "--policy", "best"], "predicted_ttft"),
        (["--engines", "http://a", "--retries", "-1"], "--retries"),
        (["--engines", "http://a", "--idle-timeout-s", "inf"], "--idle-timeout-s: got 'inf'"),
        (["--engines", "http://a", "--drain-delay-s", "inf"], "--drain-delay-s: got 'inf'"),
        (["--engines", "http://a", "--polcy", "x"], "did you mean '--policy'"),
    ],
)
def test_bad_settings_are_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GatewaySettings.load(flags, prog="warmroute-gateway", environ={})
    assert named in str(refused.value)
