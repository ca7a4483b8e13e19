"""The client against scripted servers on real sockets."""

from __future__ import annotations

import asyncio
import math
import socket
from dataclasses import replace

import pytest
from xxhash import xxh3_64_intdigest

from engine.contract import resets as resets_contract
from engine.contract.keys import canonical_chat, key_seed, prefix_keys
from loadgen.load.client import Client
from loadgen.load.target import ServerUnusable, Target
from loadgen.measure.records import RequestRecord
from tests.loadgen.load.scripted_server import (
    DONE,
    LAST,
    STREAM_HEAD,
    Request,
    Script,
    ScriptedServer,
    answer_well,
    chunk,
    event,
    plain,
    saying,
    stop,
    usage,
    whole,
    word,
)

MESSAGES = [{"role": "system", "content": "s" * 600}, {"role": "user", "content": "hello"}]


async def exchange(
    script: Script, *, deadline_s: float = math.inf, **fields: object
) -> tuple[RequestRecord, str, ScriptedServer]:
    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url, model="m", **fields)) as client:  # type: ignore[arg-type]
        now_s = asyncio.get_running_loop().time()
        call = client.call(
            MESSAGES, 7, session=3, turn=2, group="g", intended_s=now_s - 1.5, deadline_s=now_s + deadline_s
        )
        return *await client.send(call), server


async def test_a_complete_answer_is_timed_and_counted() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        writer.write(STREAM_HEAD + chunk(role))
        for piece in ("a", "b", "c"):
            await asyncio.sleep(0.03)
            writer.write(chunk(word(piece)))
        writer.write(chunk(stop()) + chunk(usage(100, 3, 64)) + chunk(DONE) + LAST)

    record, text, _ = await exchange(script)
    assert text == "abc"
    assert (record.session, record.turn, record.group) == (3, 2, "g")
    assert (record.failure, record.detail) == (None, "")
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens, record.has_usage) == (100, 64, 3, True)
    assert (record.pod, record.policy) == ("pod-7", "warm")
    assert record.sent_s - record.intended_s >= 1.5
    assert record.first_token_s is not None
    assert record.first_token_s - record.sent_s >= 0.025  # the empty role chunk is not a token
    assert len(record.gaps_s) == 2, "neither the chunk that opens the chat nor the one that ends it is a token"
    assert min(record.gaps_s) > 0.01
    assert record.last_token_s is not None
    assert record.last_token_s == pytest.approx(record.first_token_s + sum(record.gaps_s))
    assert record.last_token_s <= record.finished_s


async def test_what_is_sent_to_a_chat_endpoint() -> None:
    *_, server = await exchange(
        answer_well, policy="warm", api_key="secret", headers={"X-Team": "a"}, extra={"ignore_eos": True}
    )
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.fields == {
        **{"model": "m", "messages": MESSAGES, "max_tokens": 7, "temperature": 0, "stream": True, "ignore_eos": True},
        "stream_options": {"include_usage": True},
    }
    assert request.headers["x-warmroute-policy"] == "warm"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["x-team"] == "a"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert request.headers["x-request-id"].startswith("wr-")


async def test_a_plain_server_gets_no_header_of_ours_but_the_request_id_and_may_leave_usage_out() -> None:
    body = word("a") + stop() + DONE
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    record, text, server = await exchange(saying(head + body))
    assert [name for name in server.requests[0].headers if name.startswith("x-")] == ["x-request-id"]
    assert (record.failure, text, record.pod, record.has_usage, record.output_tokens) == (None, "a", "", False, 0)


async def test_a_completions_endpoint_gets_one_prompt_in_which_answers_follow_directly() -> None:
    def choice(text: str, reason: str | None = None) -> bytes:
        return event(choices=[{"index": 0, "text": text, "finish_reason": reason}])

    server = ScriptedServer(saying(STREAM_HEAD + chunk(choice("x") + choice("y", "length") + DONE) + LAST))
    async with server.running() as url, Client(Target(url + "/v1", "completions", "m")) as client:
        turns = [*MESSAGES, {"role": "assistant", "content": " hi"}, {"role": "user", "content": "more"}]
        record, text = await client.send(client.call(turns, 2))
    assert (record.failure, text, len(record.gaps_s)) == (None, "xy", 1)
    assert server.requests[0].path == "/v1/completions"
    assert server.requests[0].fields["prompt"] == "s" * 600 + "\n\nhello hi\n\nmore"
    assert record.sent_s == record.intended_s


async def test_prompts_have_a_fingerprint() -> None:
    record, *_ = await exchange(answer_well)
    canonical = canonical_chat(MESSAGES)
    assert record.prompt_bytes == len(canonical)
    assert record.prompt_hash == xxh3_64_intdigest(canonical)
    assert record.prefix_keys == prefix_keys(canonical, key_seed("m"))
    assert len(record.prefix_keys) == 2
    assert (await exchange(answer_well, prefix_keys=False))[0].prefix_keys == ()


async def test_request_ids_never_repeat() -> None:
    server = ScriptedServer(answer_well)
    async with server.running() as url:
        for _ in range(2):
            async with Client(Target(url, model="m")) as client:
                call = client.call(MESSAGES, 1)
                await asyncio.gather(*(client.send(call) for _ in range(5)))
    assert len({request.headers["x-request-id"] for request in server.requests}) == 10


ENDLESS = event(choices=[], usage={"prompt_tokens": "9" * 400, "completion_tokens": 1})
HEADLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("script", "label", "detail"),
    [
        (saying(plain(429, b"slow down")), "http 429", "slow down"),
        (saying(plain(503)), "http 503", ""),
        (saying(plain(307, more=b"Location: /elsewhere\r\n")), "http 307", ""),
        (saying(STREAM_HEAD + chunk(word("a")) + LAST), "truncated", "before its last event"),
        (saying(STREAM_HEAD + chunk(word("a") + DONE) + LAST), "truncated", "before its last event"),
        (saying(STREAM_HEAD + chunk(event(error={"message": "no room"}))), "error event", "no room"),
        (saying(STREAM_HEAD + chunk(event(error="no room"))), "error event", "no room"),
        (saying(STREAM_HEAD + chunk(b"data: {nonsense\n\n")), "bad answer", "JSONDecodeError"),
        (saying(STREAM_HEAD + chunk(b"data: [1]\n\n")), "bad answer", "AttributeError"),
        (
            saying(STREAM_HEAD + chunk(event(choices=[{"delta": {"content": ["a"]}}]))),
            "bad answer",
            "text is a JSON list",
        ),
        (saying(STREAM_HEAD + chunk(usage(2**31, 1) + DONE)), "bad answer", "a count of 2.15e+09 tokens"),
        (saying(STREAM_HEAD + chunk(usage(1, -1) + DONE)), "bad answer", "a count of -1 tokens"),
        (saying(STREAM_HEAD + chunk(ENDLESS + DONE)), "bad answer", "OverflowError"),
        (saying(STREAM_HEAD + chunk(usage(1, 1, 2**64 - 1) + DONE)), "bad answer", "a count of 1.84e+19 tokens"),
        (saying(HEADLESS), "bad answer", "no server-sent event in an answer of application/json"),
        (saying(b"SSH-2.0-OpenSSH_9.6\r\n"), "bad answer", "not HTTP"),
        (saying(STREAM_HEAD + b"zz\r\n"), "bad answer", "not HTTP"),
        (saying(STREAM_HEAD + chunk(word("a")), close=True), "disconnected", "closed the connection"),
        (saying(close=True), "disconnected", "closed the connection"),
        (saying(plain(200, b"x" * 10)[:-5], close=True), "disconnected", "closed the connection"),
    ],
)
async def test_each_failure_has_its_label(script: Script, label: str, detail: str) -> None:
    record, _, server = await exchange(script)
    assert record.failure == label
    assert detail in record.detail
    assert record.finished_s >= record.sent_s
    assert server.connections == 1  # the request is not sent again
    assert server.open == 0


async def test_an_answer_that_broke_off_after_its_last_event_is_complete() -> None:
    record, text, _ = await exchange(saying(STREAM_HEAD + chunk(whole()), close=True))
    assert (record.failure, text) == (None, "one two ")


async def test_a_body_may_end_with_the_connection() -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    record, text, _ = await exchange(saying(head + whole(), close=True))
    assert (record.failure, text) == (None, "one two ")
    record, *_ = await exchange(saying(head + word("a"), close=True))
    assert record.failure == "truncated"


async def test_an_interim_response_is_not_the_answer() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    record, text, _ = await exchange(saying(early, STREAM_HEAD + chunk(whole()) + LAST))
    assert (record.failure, text, record.pod) == (None, "one two ", "pod-7")


async def test_the_timeout_bounds_a_stalled_stream_and_what_came_is_kept() -> None:
    record, text, server = await exchange(saying(STREAM_HEAD + chunk(word("a"))), timeout_s=0.2)
    assert record.failure == "timeout"
    assert "0.2 s" in record.detail
    assert record.finished_s - record.sent_s >= 0.19
    assert (text, record.pod) == ("a", "pod-7")
    assert record.first_token_s is not None
    assert server.open == 0


async def test_the_end_of_the_run_cuts_off_what_is_under_way() -> None:
    record, text, _ = await exchange(saying(STREAM_HEAD + chunk(word("a"))), deadline_s=0.2)
    assert (record.failure, text, record.pod) == ("cut off", "a", "pod-7")


async def test_cancellation_closes_the_connection() -> None:
    server = ScriptedServer(saying(STREAM_HEAD + chunk(word("a"))))
    async with server.running() as url, Client(Target(url, model="m")) as client:
        task = asyncio.create_task(client.send(client.call(MESSAGES, 1)))
        async with asyncio.timeout(10):
            while not server.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while server.open:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_nobody_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with Client(Target(f"http://127.0.0.1:{port}")) as client:
        record, _ = await client.send(client.call(MESSAGES, 1))
        assert record.failure == "connect"
        assert "ConnectionRefusedError" in record.detail
        with pytest.raises(ServerUnusable, match="/v1/models: ConnectionRefusedError"):
            await client.model_id()
        assert "ConnectionRefusedError" in (await client.reset_prefix_cache() or "")


async def test_a_name_that_does_not_resolve_is_a_connection_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    async with Client(Target("http://name.invalid:80")) as client:
        record, _ = await client.send(client.call(MESSAGES, 1))
    assert record.failure == "connect"
    assert "not known" in record.detail


async def test_the_model_is_the_servers_first_unless_named() -> None:
    server = ScriptedServer(answer_well)
    async with server.running() as url:
        async with Client(Target(url)) as client:
            assert await client.model_id() == "scripted"
            await client.send(client.call(MESSAGES, 1))
        async with Client(Target(url, model="mine")) as client:
            assert await client.model_id() == "mine"
    assert [request.path for request in server.requests] == ["/v1/models", "/v1/chat/completions"]
    assert server.requests[1].fields["model"] == "scripted"


@pytest.mark.parametrize("body", [b'{"data":[]}', b"[]", b"nonsense", b'{"data":[{}]}'])
async def test_a_server_without_models_is_unusable(body: bytes) -> None:
    async with ScriptedServer(saying(plain(200, body))).running() as url, Client(Target(url)) as client:
        with pytest.raises(ServerUnusable, match="lists no model"):
            await client.model_id()


def resets(**status: int) -> Script:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(status.get(request.path.strip("/"), 404), b"said"))

    return script


@pytest.mark.parametrize(
    ("script", "problem", "tried"),
    [
        (resets(reset_prefix_cache=200), None, 1),
        (resets(flush_cache=200), None, 2),
        (resets(reset_prefix_cache=403), "POST /reset_prefix_cache: HTTP 403 said", 1),
        (resets(), "POST /reset_prefix_cache: HTTP 404 said; POST /flush_cache: HTTP 404 said", 2),
    ],
)
async def test_the_cache_is_reset_as_the_server_offers_it(script: Script, problem: str | None, tried: int) -> None:
    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url)) as client:
        assert await client.reset_prefix_cache() == problem
    assert [request.method for request in server.requests] == ["POST"] * tried


def in_use(times: int) -> Script:
    """Answer a reset as vLLM does while requests hold blocks: refuse `times` times, then succeed."""
    left = iter(range(times))

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(200, b'{"success": false}' if next(left, None) is not None else b'{"success": true}'))

    return script


async def test_a_reset_that_the_blocks_in_use_hold_up_is_repeated() -> None:
    server = ScriptedServer(in_use(2))
    async with server.running() as url, Client(Target(url)) as client:
        assert await client.reset_prefix_cache() is None
    assert [request.path for request in server.requests] == ["/reset_prefix_cache"] * 3


async def test_an_answer_of_200_that_says_no_is_a_refusal_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets_contract, "REPEATED_S", 0.25)
    server = ScriptedServer(in_use(1000))
    async with server.running() as url, Client(Target(url)) as client:
        said = await client.reset_prefix_cache()
    assert said is not None
    assert said.startswith("POST /reset_prefix_cache: the engine emptied nothing")
    assert "repeat it when no request runs" in said
    assert 2 <= len(server.requests) <= 4, "it is repeated, but not for ever"


async def test_get_text_and_a_path_before_v1() -> None:
    server = ScriptedServer(saying(plain(200, b"metric 1\n")))
    async with server.running() as url, Client(Target(f"{url}/team/v1/")) as client:
        assert await client.get_text("/metrics") == "metric 1\n"
        assert client.target.origin == f"{url}/team"
    assert server.requests[0].path == "/team/metrics"
    async with ScriptedServer(saying(plain(500, b"broken"))).running() as url, Client(Target(url)) as client:
        with pytest.raises(ServerUnusable, match=r"/metrics answered HTTP 500: broken"):
            await client.get_text("/metrics")


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Target(url)


@pytest.mark.parametrize("fields", [{"policy": "a\r\nb: c"}, {"api_key": "ключ"}, {"headers": {"a": "b\n"}}])
def test_what_cannot_be_a_header_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent in an HTTP header"):
        replace(Target("http://host"), **fields)  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(Target("http://host", api_key="secret", headers={"Cookie": "secret"}))
