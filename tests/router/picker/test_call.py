"""The picker's conversation with a proxy about one request at a time, without a socket between them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import random
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest

from router.picker.protocol import BODY_CHUNK_BYTES, DESTINATION, TEST_SELECTION, TEST_SERVED
from router.picker.server import converse
from router.picker.wire import picker_pb2 as wire
from router.startup.parts import ADMISSION, FLEET, PICKER
from router.telemetry.log import REQUESTS
from tests.router.picker.proxy import (
    PROMPT,
    REQUEST_TRAILERS,
    RESPONSE_TRAILERS,
    Context,
    Talk,
    endpoint,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, event, running, usage_event

ASKED = {"model": "m", "prompt": PROMPT, "stream": True}
EVENTS: Any = {"content_type": "text/event-stream"}
MODES = (wire.FULL_DUPLEX_STREAMED, wire.BUFFERED)


def engines(count: int = 3) -> list[ScriptedEngine]:
    return [ScriptedEngine(f"p{i}", answers(200)) for i in range(count)]


def in_flight(gateway: Gateway) -> dict[str, int]:
    return {str(pod.pod_id): pod.in_flight for pod in gateway.app[FLEET].pods("m")}


async def stream(talk: Talk, *, cached: int, prompt: int, served: str | None = None) -> None:
    """Play the engine's answer to its end, as a stream."""
    await talk.tell(
        response_headers(200, served, **EVENTS),
        response_body(event("a")),
        response_body(usage_event(prompt, 1, cached) + b"data: [DONE]\n\n", is_end=True),
    )


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_goes_where_its_prefix_is(mode: int) -> None:
    pods = engines()
    async with running(*pods, policy="predicted_ttft") as gateway:
        picked = []
        for _ in range(4):
            async with Talk(gateway) as talk:
                await talk.ask(ASKED, mode=mode)
                assert set(talk.picked) <= {endpoint(pod) for pod in pods}
                assert sum(in_flight(gateway).values()) == 1
                picked.append(talk.picked)
                tokens = len(PROMPT) // 4
                await stream(talk, cached=tokens if len(picked) > 1 else 0, prompt=tokens)
                assert sum(in_flight(gateway).values()) == 0
                assert gateway.app[ADMISSION].in_flight == 1
        assert picked == [picked[0]] * 4
        metrics = (await gateway.get("/metrics")).body.decode()
        assert f'tokens_total{{kind="cached",policy="predicted_ttft"}} {3 * tokens}.0' in metrics


async def test_the_body_goes_on_as_it_came() -> None:
    async with running(*engines(1)) as gateway:
        text = orjson.dumps({"model": "m", "prompt": "y" * (3 * BODY_CHUNK_BYTES)})
        for body in (text, gzip.compress(text), orjson.dumps({"model": "m", "prompt": ""})):
            head: Any = {"content_encoding": "gzip"} if body[:2] == b"\x1f\x8b" else {}
            async with Talk(gateway) as talk:
                await talk.tell(request_headers(**head), request_body(body[:7], is_end=False))
                assert not talk.said
                await talk.tell(request_body(body[7:]))
                assert talk.body == body
                sent = [one.request_body.response.body_mutation.streamed_response for one in talk.said[1:]]
                assert [one.end_of_stream for one in sent] == [False] * (len(sent) - 1) + [True]
                assert max(len(one.body) for one in sent) <= BODY_CHUNK_BYTES


async def test_the_body_goes_on_with_trailers_behind_it() -> None:
    async with running(*engines(1)) as gateway, Talk(gateway) as talk:
        await talk.tell(request_headers(), request_body(ASKED, is_end=False), REQUEST_TRAILERS)
        assert talk.body == orjson.dumps(ASKED)
        assert not talk.said[-2].request_body.response.body_mutation.streamed_response.end_of_stream
        assert talk.said[-1].HasField("request_trailers")


async def test_a_body_that_the_gateway_rewrites_has_its_own_length() -> None:
    """The gateway replaces an alias: an engine gets the model's own name."""
    for mode in MODES:
        async with running(*engines(1), model_alias=["gpt=m"]) as gateway, Talk(gateway) as talk:
            sent = gzip.compress(orjson.dumps({"model": "gpt", "prompt": "x"}))
            await talk.tell(request_headers(mode=mode, content_encoding="gzip"), request_body(sent))
            body = talk.body if mode == wire.FULL_DUPLEX_STREAMED else talk.common.body_mutation.body
            assert orjson.loads(body) == {"model": "m", "prompt": "x"}
            assert "content-encoding" in talk.common.header_mutation.remove_headers
            if mode == wire.FULL_DUPLEX_STREAMED:
                assert talk.fields["content-length"] == str(len(body))


async def test_only_allowed_endpoints_are_picked() -> None:
    pods = engines(3)
    async with running(*pods, ext_proc_port=0, ext_proc_fallbacks=2) as gateway:
        for allowed in ([endpoint(pods[1])], [endpoint(pods[2]), endpoint(pods[0]), "10.9.9.9:1"]):
            for _ in range(4):
                async with Talk(gateway) as talk:
                    await talk.ask(ASKED, subset=allowed)
                    assert set(talk.picked) == set(allowed) - {"10.9.9.9:1"}
        for none in ([], ["10.9.9.9:1"]):
            for is_end in (False, True):
                async with Talk(gateway) as talk:
                    await talk.tell(request_headers(subset=none, is_end=is_end))
                    if not is_end:
                        await talk.tell(request_body(ASKED))
                    assert talk.refusal[0] == 503
                    assert talk.call.is_over


async def test_a_client_chooses_its_endpoint_in_conformance_tests_alone() -> None:
    for allowed in (False, True):
        pods = engines(3)
        options: dict[str, Any] = {"ext_proc_port": 0, "allow_policy_header": allowed}
        async with running(*pods, **options) as gateway:
            found = set()
            for _ in range(6):
                async with Talk(gateway) as talk:
                    await talk.ask(ASKED, **{TEST_SELECTION: endpoint(pods[1])})
                    found |= set(talk.picked)
                    (answer,) = await talk.tell(response_headers(200, talk.picked[0], is_end=True))
                    names = {one.header.key for one in answer.response_headers.response.header_mutation.set_headers}
                    assert (TEST_SERVED in names) is allowed
            assert (found == {endpoint(pods[1])}) is allowed


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        ({"model": "m"}, 400, "prompt"),
        ({"model": "unknown", "prompt": "x"}, 404, "model"),
        ({"model": "m", "prompt": "x" * 2000}, 413, None),
    ],
)
async def test_what_cannot_be_read_is_refused_in_the_shape_of_the_api(
    body: Any, status: int, param: str | None
) -> None:
    async with running(*engines(1), max_body_bytes=1024) as gateway, Talk(gateway) as talk:
        await talk.ask(body)
        code, error = talk.refusal
        assert (code, error["param"]) == (status, param)
        assert error["message"]
        assert talk.call.is_over


async def test_clients_show_their_keys_and_engines_see_the_gateways(tmp_path: Path) -> None:
    clients, own = tmp_path / "clients", tmp_path / "own"
    clients.write_text("client-key-0123456789\n")
    own.write_text("engine-key-0123456789\n")
    files: Any = {"api_keys_file": str(clients), "engine_api_key_file": str(own)}
    async with running(*engines(1), **files) as gateway:
        async with Talk(gateway) as talk:
            await talk.tell(request_headers(authorization="Bearer wrong"))
            assert talk.refusal[0] == 401
        async with Talk(gateway) as talk:
            await talk.ask(ASKED, authorization="Bearer client-key-0123456789", x_warmroute_priority="-1")
            assert talk.fields["Authorization"] == "Bearer engine-key-0123456789"
            assert {"x-api-key", "x-warmroute-priority"} <= set(talk.common.header_mutation.remove_headers)


async def test_bytes_that_are_not_text_are_logged_as_question_marks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(REQUESTS)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger=REQUESTS):
        async with running(*engines(1)) as gateway, Talk(gateway) as talk:
            await talk.tell(request_headers("/v1/odd/\udcff", x_forwarded_for="10.0.0.1, \udcfe"))
    (line,) = (orjson.loads(record.message) for record in caplog.records if record.name == REQUESTS)
    assert (line["path"], line["client"], line["status"]) == ("/v1/odd/?", "?", 404)


async def test_more_than_the_gateway_takes_is_refused() -> None:
    async with running(*engines(1), max_in_flight=1) as gateway, Talk(gateway) as first:
        await first.ask(ASKED)
        async with Talk(gateway) as second:
            await second.tell(request_headers())
            assert second.refusal[0] == 429


async def test_a_saturated_fleet_is_429_after_the_queue() -> None:
    limits: Any = {"max_pod_requests": 1, "queue_timeout_s": 0.05}
    async with running(*engines(1), **limits) as gateway, Talk(gateway) as first:
        await first.ask(ASKED)
        async with Talk(gateway) as second:
            await second.ask(ASKED)
            assert second.refusal[0] == 429
            names = {one.header.key for one in second.said[-1].immediate_response.headers.set_headers}
            assert {"retry-after", "content-type", "x-request-id"} <= names


async def test_a_refusal_shows_how_many_other_requests_the_pod_takes() -> None:
    async with contextlib.AsyncExitStack() as open_talks:
        gateway = await open_talks.enter_async_context(running(*engines(1)))
        for _ in range(3):
            await (await open_talks.enter_async_context(Talk(gateway))).ask(ASKED)
        async with Talk(gateway) as refused:
            await refused.ask(ASKED)
            await refused.tell(response_headers(429), response_body(b"{}", is_end=True))
        (pod,) = gateway.app[FLEET].pods("m")
        assert pod.cap.limit(asyncio.get_running_loop().time()) == 3


async def test_without_an_engine_it_is_503() -> None:
    pods = engines(1)
    async with running(*pods, eject_after=1) as gateway:
        await pods[0].stop()
        await gateway.wait_pods(0)
        for ask in (request_headers(is_end=True), None):
            async with Talk(gateway) as talk:
                if ask is None:
                    await talk.ask(ASKED)
                else:
                    await talk.tell(ask)
                assert talk.refusal[0] == 503


async def test_a_fallback_that_served_has_the_request_and_its_prefix() -> None:
    pods = engines(2)
    async with running(*pods, policy="predicted_ttft", ext_proc_port=0, ext_proc_fallbacks=2) as gateway:
        async with Talk(gateway) as talk:
            await talk.ask(ASKED)
            first, other = talk.picked
            await talk.tell(response_headers(200, other, **EVENTS))
            counts = {endpoint(pod): in_flight(gateway)[str(pod.pod)] for pod in pods}
            assert counts == {first: 0, other: 1}
            tokens = len(PROMPT) // 4
            await talk.tell(response_body(event("a")), response_body(usage_event(tokens, 1, 0), is_end=True))
            assert sum(in_flight(gateway).values()) == 0
        async with Talk(gateway) as talk:
            await talk.ask(ASKED)
            assert talk.picked[0] == other


async def test_an_endpoint_that_is_none_of_ours_teaches_nothing() -> None:
    async with running(*engines(1)) as gateway, Talk(gateway) as talk:
        await talk.ask(ASKED)
        await stream(talk, cached=0, prompt=10, served="10.9.9.9:1")
        assert sum(in_flight(gateway).values()) == 0


async def test_a_pod_that_cannot_be_reached_is_probed_and_holds_nothing() -> None:
    async with running(*engines(1), policy="predicted_ttft", eject_after=1, probe_interval_s=60) as gateway:
        async with Talk(gateway) as talk:
            await talk.ask(ASKED)
            words = b"upstream connect error or disconnect/reset before headers. reset reason: connection failure"
            await talk.tell(response_headers(503, content_type="text/plain"), response_body(words, is_end=True))
        assert not gateway.app[FLEET].pods("m")
        await gateway.wait_pods(1)  # the pod was probed at once


async def test_paths_without_prefixes_go_by_load() -> None:
    pods = engines(2)
    async with running(*pods) as gateway, Talk(gateway) as first:
        await first.ask({"model": "m", "input": "x"}, path="/v1/embeddings")
        async with Talk(gateway) as second:
            await second.tell(request_headers("/v1/audio/transcriptions"), request_body(b"--x--"))
            assert {first.picked[0], second.picked[0]} == {endpoint(pod) for pod in pods}
            assert sum(in_flight(gateway).values()) == 2
        assert sum(in_flight(gateway).values()) == 1


async def test_a_proxy_that_shows_no_body_gets_a_pod_by_load() -> None:
    async with running(*engines(2)) as gateway:
        for mode in (wire.NONE, wire.STREAMED):
            async with Talk(gateway) as talk:
                await talk.tell(request_headers(mode=mode))
                assert talk.picked
                if mode == wire.STREAMED:
                    assert (await talk.tell(request_body(ASKED)))[0].HasField("request_body")
                await talk.tell(response_headers(200))
            assert sum(in_flight(gateway).values()) == 0


async def test_a_body_that_does_not_come_is_408() -> None:
    async with running(*engines(1), body_timeout_s=0.05) as gateway:
        context = Context([request_headers(), request_body(b"{", is_end=False)], is_silent=True)
        await converse(gateway.app[PICKER], context)
        (refusal,) = context.written
        assert refusal.immediate_response.status.code == 408


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async with running(*engines(1), total_timeout_s=0.2) as gateway:
        context = Context([request_headers(), request_body(ASKED), response_headers(200, **EVENTS)], is_silent=True)
        with pytest.raises(grpc.aio.AbortError):
            await converse(gateway.app[PICKER], context)
        assert context.aborted is grpc.StatusCode.DEADLINE_EXCEEDED


MESSAGES = (
    request_headers(),
    request_headers(mode=wire.BUFFERED),
    request_headers(mode=wire.STREAMED),
    request_headers("/v1/models", is_end=True, method="GET"),
    request_headers(subset=["10.9.9.9:1"]),
    request_headers(answers=wire.NONE),
    request_body(ASKED),
    request_body(ASKED),
    request_body(b"{"),
    request_body(b"", is_end=False),
    response_headers(200, **EVENTS),
    response_headers(200, is_end=True),
    response_headers(200, "10.9.9.9:1", **EVENTS),
    response_headers(503, retry_after="1"),
    response_headers(500),
    response_headers(404),
    response_body(event("a")),
    response_body(b'data: {"error": {"message": "broken", "code": 500}}\n\n'),
    response_body(usage_event(10, 1, 3), is_end=True),
    response_body(b"", is_end=True),
    REQUEST_TRAILERS,
    RESPONSE_TRAILERS,
    wire.ProcessingRequest(),
)
USUAL = (
    (MESSAGES[:6], 0.95),
    (MESSAGES[6:10], 0.9),
    (MESSAGES[10:16], 0.85),
    (MESSAGES[16:20], 0.9),
    (MESSAGES[16:20], 0.5),
)


def conversation(rng: random.Random) -> list[wire.ProcessingRequest]:
    """Return a plausible conversation, one that is cut off, or one with messages out of place."""
    if rng.random() < 0.3:
        return rng.choices(MESSAGES, k=rng.randrange(8))
    messages = [rng.choice(kind) for kind, share in USUAL if rng.random() < share]
    if rng.random() < 0.2:
        messages.insert(rng.randrange(len(messages) + 1), rng.choice(MESSAGES))
    return messages


async def test_nothing_is_left_behind_whatever_is_said_in_whatever_order() -> None:
    """Conversations run at the same time, and some are reset at any step. All counts return to zero, and no
    more conversations are recorded than have begun."""
    rng = random.Random(19)
    options: Any = {"max_pod_requests": 4, "queue_timeout_s": 0.05}
    async with running(*engines(3), policy="predicted_ttft", **options) as gateway:
        parts, recorded, begun, statuses = gateway.app[PICKER], [], 0, set()
        recorder = parts.recorder
        ended = recorder.ended

        def count(exchange: Any, path: str, who: Any) -> None:
            recorded.append(exchange)
            statuses.add(exchange.status)
            ended(exchange, path, who)

        recorder.ended = count  # type: ignore[method-assign]
        for _ in range(40):
            contexts = [Context(conversation(rng), is_silent=rng.random() < 0.5) for _ in range(8)]
            begun += sum(bool(c._messages) and c._messages[0].HasField("request_headers") for c in contexts)
            tasks = [asyncio.create_task(converse(parts, context)) for context in contexts]
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            for task in tasks:
                if rng.random() < 0.5:
                    task.cancel()
            await asyncio.sleep(0.002)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    assert isinstance(error, grpc.aio.AbortError), error
            assert gateway.app[ADMISSION].in_flight == gateway.app[ADMISSION].body_bytes == 0
            assert sum(in_flight(gateway).values()) == 0
        assert 0 < len(recorded) <= begun
        assert len({id(exchange) for exchange in recorded}) == len(recorded), "one is recorded twice"
        assert {200, 400, 404, 499, 500, 503} <= statuses


async def test_a_message_out_of_order_ends_the_stream() -> None:
    async with running(*engines(1)) as gateway:
        for messages in ([request_body(ASKED)], [request_headers(), response_headers(200)], [request_headers()] * 2):
            context = Context(messages)
            with pytest.raises(grpc.aio.AbortError):
                await converse(gateway.app[PICKER], context)
            assert context.aborted is grpc.StatusCode.INVALID_ARGUMENT
            assert DESTINATION not in str(context.written)
