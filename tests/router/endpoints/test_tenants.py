"""Tenants at a gateway: their rights and limits, their separate caches, and their accounts."""

# the files are tiny

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from blockbuster import BlockBuster
from prometheus_client.parser import text_string_to_metric_families

from engine.common import files
from engine.common.files import UnusableFile
from engine.common.sse import DONE
from engine.contract import headers
from router.edge.headers import CACHE_FACTS
from router.tenants import limiter
from tests.redis_server import RedisServer, running_redis
from tests.router.rig.helpers import (
    Gateway,
    ScriptedEngine,
    answers,
    event,
    eventually,
    running,
    stalls_after,
    streams,
)
from tests.router.startup.test_process import program

PROMPT = "the same words for everybody, and enough of them for some prefix keys; " * 20
ASK = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
SAID = orjson.dumps(
    {
        "choices": [{"text": "x"}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 100}},
    }
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tenants(**entries: str) -> str:
    """Return the text of a file of tenants. `entries`: a tenant's further lines by its name; its key is key-NAME."""
    parts = ["tenants:"]
    for name, more in entries.items():
        digest = sha256(f"key-{name}".encode()).hexdigest()
        expires = "" if "expires" not in more else f", expires: {more.split('expires: ')[1].split(';')[0]}"
        parts += [f"  - name: {name}", f"    keys: [{{sha256: {digest}{expires}}}]"]
        parts += [f"    {line.strip()}" for line in more.split(";") if line.strip() and "expires" not in line]
    return "\n".join(parts)


@pytest.fixture
def folder(tmp_path: Path, no_blocking_calls: BlockBuster) -> Path:
    no_blocking_calls.deactivate()  # the tests themselves write the files
    (tmp_path / "secret").write_text("s" * 40)
    return tmp_path


def settings(folder: Path, **entries: str) -> dict[str, Any]:
    (folder / "tenants").write_text(tenants(**entries))
    return {"tenants_file": str(folder / "tenants"), "tenant_secret_file": str(folder / "secret")}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def metric(gateway: Gateway, name: str) -> dict[tuple[str, ...], float]:
    """Return label values (the tenant first) -> value, for the samples of that name that are not 0."""
    text = (await gateway.get("/metrics")).body.decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return {
        tuple(
            sample.labels[label] for label in sorted(sample.labels, key=lambda label: label != "tenant")
        ): sample.value
        for sample in samples
        if sample.value
    }


async def test_a_key_is_good_for_its_tenants_models_until_it_expires(folder: Path) -> None:
    engine = ScriptedEngine("a", answers(200, SAID), models=("llama-8b", "llama-70b", "qwen"))
    given = settings(folder, some="models: [llama-*]", all="", old="expires: 2020-01-01T00:00:00Z")
    async with running(engine, **given) as gateway:

        async def listed(key: str) -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
                return [model.id for model in (await client.models.list()).data]

        assert await listed("key-some") == ["llama-70b", "llama-8b"]
        assert await listed("key-all") == ["llama-70b", "llama-8b", "qwen"]
        for model, key, status in (
            *(("llama-8b", "some", 200), ("qwen", "all", 200), ("qwen", "some", 403), ("no-such", "some", 403)),
            *(("no-such", "all", 404), ("llama-9b", "some", 404), ("llama-8b", "old", 401), ("llama-8b", "none", 401)),
        ):
            answer = await gateway.post({**ASK, "model": model}, **bearer(f"key-{key}"))
            assert answer.status == status, (model, key)
            async with gateway.session.get(f"{gateway.url}/v1/models/{model}", headers=bearer(f"key-{key}")) as one:
                assert one.status == status
            if status == 200:
                continue
            error = answer.json["error"]
            assert error["code"] == {401: error["code"], 403: "model_not_allowed", 404: "model_not_found"}[status]
            assert (key == "some" and "qwen" in error["message"]) == (model == "qwen"), "others' models are not shown"
            if key == "old":
                assert (error["code"], "2020-01-01T00:00:00Z" in error["message"]) == ("expired_api_key", True)
        answer = await gateway.post({"prompt": "x"}, **bearer("key-some"))
        assert "llama-70b, llama-8b" in answer.json["error"]["message"]
        refused = await metric(gateway, "warmroute_gateway_tenant_refused_total")
        assert refused == {("some", "model"): 2, ("old", "expired"): 2}
    assert not [sent for sent in engine.received if "Authorization" in sent.headers]


async def test_plain_keys_are_the_default_tenants(folder: Path) -> None:
    (folder / "keys").write_text("plain\n")
    given = settings(folder, a="") | {"api_keys_file": str(folder / "keys")}
    async with running(ScriptedEngine("a", answers(200, SAID)), **given) as gateway:
        for key in ("plain", "key-a"):
            assert (await gateway.post(ASK, **bearer(key))).status == 200
        assert await metric(gateway, "warmroute_gateway_tenant_requests_total") == {
            ("default", "200"): 1,
            ("a", "200"): 1,
        }


async def test_the_file_is_read_again_and_a_bad_one_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "REREAD_S", 0.02)
    file = folder / "tenants"
    async with running(ScriptedEngine("a", answers(200, SAID)), **settings(folder, a="", b="")) as gateway:

        async def until(key: str, status: int) -> None:
            async with asyncio.timeout(60):
                while (await gateway.post(ASK, **bearer(key))).status != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        await until("key-a", 200)
        file.write_text(tenants(b="weight: -1"))
        await eventually(lambda: "line 4: tenants[0].weight" in caplog.text)
        assert (await gateway.post(ASK, **bearer("key-a"))).status == 200
        file.write_text(tenants(b="", c=""))
        await until("key-c", 200)
        await until("key-a", 401)
        assert {name for name, _ in await metric(gateway, "warmroute_gateway_tenant_requests_total")} == {"c"}


async def test_a_file_that_cannot_be_used_keeps_the_gateway_from_starting(folder: Path) -> None:
    given = settings(folder, a="isolation: tenant")
    del given["tenant_secret_file"]
    with pytest.raises(UnusableFile, match="needs the gateway's --tenant-secret-file"):
        async with running(ScriptedEngine("a", answers(200)), **given):
            pass


async def test_equal_prompts_of_two_tenants_share_nothing(folder: Path) -> None:
    """This holds for the gateway's prediction, and for the salt that an engine such as vLLM keys its blocks by."""
    engine = ScriptedEngine("a", answers(200, SAID))
    given = settings(folder, a="isolation: tenant", b="isolation: tenant", c="", d="")
    async with running(engine, **given) as gateway:

        async def ask(name: str, **more: str) -> tuple[int, str | None]:
            answer = await gateway.post({**ASK, **more}, **bearer(f"key-{name}"))
            assert answer.status == 200
            sent = orjson.loads(engine.received[-1].body)
            assert {key: sent[key] for key in ASK} == ASK
            return int(answer.headers[headers.PREDICTED_CACHED]), sent.get("cache_salt")

        cached, salt_a = await ask("a")
        assert (cached, len(salt_a or "")) == (0, 64)
        cached, again = await ask("a")
        assert cached > 100, "its own cache is used"
        assert again == salt_a
        cached, salt_b = await ask("b")
        assert cached == 0
        assert salt_b not in (salt_a, None)
        assert (await ask("b", cache_salt=str(salt_a)))[0] == 0, "knowing another tenant's salt is of no use"
        cached, combined = await ask("a", cache_salt="mine")
        assert cached == 0
        assert combined not in ("mine", salt_a, None)
        assert await ask("c") == (0, None)
        cached, salt = await ask("d")
        assert cached > 100, "tenants without isolation share their caches"
        assert salt is None
        cached, salt = await ask("c", cache_salt=str(salt_a))
        assert (cached, salt != salt_a) == (0, True), "the salt is of no use to a tenant without isolation either"


async def test_salts_of_requests_without_keys_are_the_tenants_too(folder: Path) -> None:
    """An engine may cache the KV of embeddings like that of chats."""
    engine = ScriptedEngine("a", answers(200, SAID))
    async with running(engine, **settings(folder, a="isolation: tenant", c="")) as gateway:

        async def ask(name: str, path: str = "/v1/embeddings", **more: object) -> object:
            answer = await gateway.post({"model": "m", "input": "x", **more}, path=path, **bearer(f"key-{name}"))
            return orjson.loads(engine.received[-1].body).get("cache_salt") if answer.status == 200 else answer.status

        salt_a = await ask("a")
        assert salt_a == await ask("a", "/v1/responses", store=False)
        assert await ask("a", cache_salt="mine") == await ask("a", "/v1/responses", cache_salt="mine", store=False)
        assert await ask("a", cache_salt="mine") not in ("mine", salt_a)
        assert await ask("c") is None
        assert await ask("c", cache_salt=salt_a) not in (salt_a, None)
        assert [await ask(name, cache_salt=7) for name in "ac"] == [400, 400]


async def test_if_a_body_has_two_salts_neither_reaches_the_engine(folder: Path) -> None:
    engine = ScriptedEngine("a", answers(200, SAID))
    async with running(engine, **settings(folder, a="isolation: tenant")) as gateway:
        body = b'{"cache\\u005fsalt":"x", "prompt": "p",\n "model":"m","cache_salt":"y" ,"big":1e300,"id":0.10}'
        assert (await gateway.post(body, **bearer("key-a"))).status == 200
        assert (await gateway.post(b'{"cache_salt":7,"prompt":"p"}', **bearer("key-a"))).status == 400
    salt = orjson.loads(engine.received[0].body)["cache_salt"]
    assert engine.received[0].body == (
        b'{"cache_salt":"%b", "prompt": "p",\n "model":"m","big":1e300,"id":0.10}' % salt.encode()
    )


@pytest.mark.parametrize("is_global", [True, False])
async def test_headers_with_cache_facts_can_be_switched_off(folder: Path, is_global: bool) -> None:
    facts = dict.fromkeys(CACHE_FACTS, "1")
    engine = ScriptedEngine("a", answers(200, SAID, extra=facts))
    given = settings(folder, a="" if is_global else "cache_headers: false", b="")
    async with running(engine, **given, cache_headers=not is_global) as gateway:
        for name in ("a", "b"):
            answer = await gateway.post(ASK, **bearer(f"key-{name}"))
            is_told = name == "b" and not is_global
            told = {header for header in (*CACHE_FACTS, headers.POD) if header in answer.headers}
            assert told == ({*CACHE_FACTS, headers.POD} if is_told else set())
            assert headers.REQUEST_ID in answer.headers


async def test_a_tenant_at_its_limit_is_told_when_to_come_back(folder: Path) -> None:
    given = settings(folder, a="requests_per_minute: 3; tokens_per_minute: 100000", b="")
    async with running(ScriptedEngine("a", answers(200, SAID)), **given) as gateway:
        left = []
        for _ in range(3):
            answer = await gateway.post(ASK, **bearer("key-a"))
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
            assert answer.headers["x-ratelimit-reset-requests"] == "60s"
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        assert left == [2, 1, 0]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-a", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError, match="the limit of 3 requests a minute") as refused:
                await client.completions.create(model="m", prompt="x")
        assert refused.value.code == "rate_limit_exceeded"
        told = refused.value.response.headers
        assert 30 <= int(told["retry-after"]) <= 62
        assert (told["x-ratelimit-remaining-requests"], told["x-ratelimit-limit-requests"]) == ("0", "3")
        answer = await gateway.post(ASK, **bearer("key-b"))
        assert (answer.status, "x-ratelimit-limit-requests" in answer.headers) == (200, False)
        assert await metric(gateway, "warmroute_gateway_tenant_refused_total") == {("a", "requests"): 1}


async def test_what_no_engine_served_takes_no_tokens(folder: Path) -> None:
    """Each request reserves about 340 of 600 tokens: two fit only if the first returns its unused tokens."""
    engine = ScriptedEngine("a", answers(400, b'{"error":{"message":"no"}}'))
    async with running(engine, **settings(folder, a="tokens_per_minute: 600")) as gateway:
        for _ in range(5):
            assert (await gateway.post(ASK, **bearer("key-a"))).status == 400
        engine.script = answers(200, SAID)
        assert (await gateway.post(ASK, **bearer("key-a"))).status == 200
        answer = await gateway.post(ASK, **bearer("key-a"))
        assert (answer.status, "tokens a minute" in answer.json["error"]["message"]) == (429, True)


async def test_a_request_takes_its_prompt_and_its_answer_from_the_limit(folder: Path) -> None:
    """Each request reserves about 340 of 1000 tokens and takes 600, so a third one does not fit."""
    said = orjson.dumps({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 300, "completion_tokens": 300}})
    engine = ScriptedEngine("a", answers(200, said))
    async with running(engine, **settings(folder, a="tokens_per_minute: 1000")) as gateway:
        assert [(await gateway.post(ASK, **bearer("key-a"))).status for _ in range(3)] == [200, 200, 429]


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "more", "statuses"),
    [
        ("/v1/completions", {"prompt": ["x"] * 20}, [200, 429]),
        ("/v1/completions", {"prompt": ["x"] * 4, "n": 5}, [200, 429]),
        ("/v1/completions", {"prompt": "x", "n": 1, "best_of": 20}, [200, 429]),
        ("/v1/chat/completions", {**CHAT, "n": 20}, [200, 429]),
        ("/v1/chat/completions", {**CHAT, "n": 10**9}, [429, 429]),
        ("/v1/completions", {"prompt": "x", "n": [20], "best_of": -20}, [200, 200]),
        ("/v1/messages", {**CHAT, "n": 20}, [200, 200]),
    ],
)
async def test_a_request_reserves_all_answers_that_it_asks_for(
    folder: Path, path: str, more: Any, statuses: list[int]
) -> None:
    """Each answer has 50 tokens, and two times 20 answers do not fit. Streams need not report usage."""
    engine = ScriptedEngine("a", streams([event("x"), b"data: [DONE]\n\n"]))
    ask = {"model": "m", "max_tokens": 50, "stream": True, **more}
    async with running(engine, **settings(folder, a="tokens_per_minute: 1900")) as gateway:
        assert [(await gateway.post(ask, path=path, **bearer("key-a"))).status for _ in range(2)] == statuses


@pytest.mark.parametrize("more", [{"prompt": ["x"] * 20}, {"prompt": "x", "n": 20}])
async def test_one_tenants_many_answers_do_not_make_another_tenants_requests_dear(folder: Path, more: Any) -> None:
    """What is learnt of a model's answers is their length, however many answers a request has."""
    said = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 20 * 50}})
    engine = ScriptedEngine("a", answers(200, said))
    async with running(engine, **settings(folder, a="", b="tokens_per_minute: 300")) as gateway:
        for _ in range(60):
            assert (await gateway.post({"model": "m", **more}, **bearer("key-a"))).status == 200
        assert (await gateway.post({"model": "m", "prompt": "x"}, **bearer("key-b"))).status == 200


async def test_requests_at_once_end_with_their_clients(folder: Path) -> None:
    engine = ScriptedEngine("a", stalls_after([event("x")]))
    async with running(engine, **settings(folder, a="requests_at_once: 1")) as gateway:
        stream = {**ASK, "stream": True}
        answer = await gateway.session.post(f"{gateway.url}/v1/completions", json=stream, headers=bearer("key-a"))
        await answer.content.readany()
        refused = await gateway.post(stream, **bearer("key-a"))
        assert (refused.status, "1 requests at once" in refused.json["error"]["message"]) == (429, True)
        answer.close()
        engine.script = streams([event("y"), b"data: [DONE]\n\n"])
        async with asyncio.timeout(60):
            while (await gateway.post(stream, **bearer("key-a"))).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.mark.realtime
async def test_two_gateways_keep_one_limit_through_redis_and_share_it_without(
    folder: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "ASK_S", 30.0)  # however slow this machine is
    engine = ScriptedEngine("a", answers(200, SAID))
    given = settings(folder, a="requests_per_minute: 40") | {"redis_url": redis.url, "warm_timeout_s": 0.0}

    async def offer(*gateways: Gateway) -> list[int]:
        asked = [gateway.post(ASK, **bearer("key-a")) for gateway in gateways for _ in range(40)]
        return [answer.status for answer in await asyncio.gather(*asked)]

    async with running(engine, **given) as first, running(engine, **given) as second:
        assert (await offer(first, second)).count(200) == 40
        assert not await metric(first, "warmroute_gateway_limits_alone")
        redis.stop()
        async with asyncio.timeout(60):
            while not await metric(first, "warmroute_gateway_limits_alone"):
                await first.post(ASK, **bearer("key-a"))
                await asyncio.sleep(0.05)
        redis.start()
        async with asyncio.timeout(60):
            while await metric(first, "warmroute_gateway_limits_alone"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_what_tenants_use_is_counted_and_logged(folder: Path) -> None:
    engine = ScriptedEngine("a", answers(200, SAID))
    (folder / "usage").mkdir()
    given = settings(folder, a="", b="") | {"usage_log": str(folder / "usage")}
    async with running(engine, **given) as gateway:
        for name in "aab":
            assert (await gateway.post(ASK, **bearer(f"key-{name}"), **{"x-request-id": f"id-{name}"})).status == 200
        engine.script = answers(400)
        assert (await gateway.post(ASK, **bearer("key-b"))).status == 400
        engine.script = streams([event("x"), b"data: [DONE]\n\n"])
        assert (await gateway.post({**ASK, "stream": True}, **bearer("key-b"))).status == 200
        tokens = await metric(gateway, "warmroute_gateway_tenant_tokens_total")
        requests = await metric(gateway, "warmroute_gateway_tenant_requests_total")
    assert {labels: tokens[labels] for labels in tokens if labels[0] == "a"} == {
        ("a", "prompt"): 600,
        ("a", "cached"): 200,
        ("a", "output"): 10,
    }
    assert requests == {("a", "200"): 2, ("b", "200"): 2, ("b", "400"): 1}
    (path,) = (folder / "usage").iterdir()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [(line["tenant"], line["prompt_tokens"], line["estimated"]) for line in lines[:3]] == [
        *(("a", 300, []), ("a", 300, []), ("b", 300, []))
    ]
    assert (
        lines[0].items()
        >= {
            "request_id": "id-a",
            "endpoint": "/v1/completions",
            "model": "m",
            "status": 200,
            "cached_tokens": 100,
            "completion_tokens": 5,
        }.items()
    )
    assert (len(lines), lines[3]["estimated"]) == (4, ["prompt_tokens", "cached_tokens", "completion_tokens"])


@pytest.mark.realtime
async def test_on_sigterm_every_line_of_the_usage_log_is_written(folder: Path) -> None:
    """Some answers ended just before the signal, one ends after it, and a second signal cuts one off."""
    usage = folder / "usage"
    usage.mkdir()
    engine = ScriptedEngine("a", answers(200, SAID))
    async with program(engine, "--usage-log", str(usage)) as (process, url), aiohttp.ClientSession() as session:
        for _ in range(20):
            async with session.post(f"{url}/v1/completions", json=ASK) as answer:
                assert answer.status == 200
        engine.script = streams([*(event(str(number)) for number in range(20)), DONE], gap_s=0.02)
        async with session.post(f"{url}/v1/completions", json={**ASK, "stream": True}) as answer:
            await answer.content.readany()
            engine.script = stalls_after([event("x")])
            async with session.post(f"{url}/v1/completions", json={**ASK, "stream": True}) as cut:
                await cut.content.readany()
                process.send_signal(signal.SIGTERM)
                await answer.read()
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    assert await process.wait() == 0
    (path,) = usage.iterdir()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["status"] for line in lines].count(200) >= 21
    assert len(lines) == 22


async def test_an_operator_sees_the_decision_that_a_tenant_gets(folder: Path) -> None:
    """An isolated tenant's keys have its salt. Without the tenant's name, a decision sees none of its warm prefixes."""
    engines = [ScriptedEngine(name, answers(200, SAID)) for name in "ab"]
    kept = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
    more: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}]}
    explain = "/v1/route/explain"
    async with running(
        *engines, policy="cache_aware", **settings(folder, a="isolation: tenant", b="isolation: tenant")
    ) as gateway:
        made = await gateway.post(kept, path="/v1/caches", **bearer("key-a"))
        name = {"cached_content": made.json["name"]}
        served = await gateway.post({**more, **name}, path="/v1/chat/completions", **bearer("key-a"))
        assert served.status == 200
        for body in (name | more, {**kept, "messages": kept["messages"] + more["messages"]}):
            mine = (await gateway.post(body, path=explain, **{headers.TENANT: "a"})).json
            assert (mine["tenant"], mine["pod"], mine["cached_tokens_predicted"] > 100) == ("a", served.pod, True)
        for other in ({}, {headers.TENANT: "b"}):
            theirs = (await gateway.post(kept, path=explain, **other)).json
            assert theirs["cached_tokens_predicted"] == 0
            hidden = await gateway.post(name | more, path=explain, **other)
            assert (hidden.status, hidden.json["error"]["code"]) == (404, "cache_not_found")
        nobody = await gateway.post(kept, path=explain, **{headers.TENANT: "c"})
        assert (nobody.status, nobody.json["error"]["param"]) == (400, headers.TENANT)
