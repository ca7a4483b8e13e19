"""`/v1/caches`: a cache is stored once, named by requests, kept for its time, and invisible to other tenants."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import ApiError, BadRequest
from engine.contract.keys import canonical_chat
from engine.contract.requests import Endpoint, request_head
from router.reading.named_cache import CacheMeta, expanded, new_id, parse_expiry, parse_new
from router.stored.cache_store import MIB
from tests.redis_server import RedisServer
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, eventually, running, stalls_after

CHAT, MESSAGES, CACHES = "/v1/chat/completions", "/v1/messages", "/v1/caches"
BOOK = "The handbook says that pods restart when their probes fail. " * 60
STORED = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": BOOK}]}
ASK = [{"role": "user", "content": "Why?"}]
NOW_S = 1_700_000_000.0
DONE = answers(200, orjson.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}))


class Engine(ScriptedEngine):
    """An engine that says, if `keeps`, that it keeps marked prefixes."""

    keeps = False

    async def _models(self, request: web.Request) -> web.Response:
        response = await super()._models(request)
        if self.keeps:
            told = orjson.loads(response.body)  # type: ignore[arg-type]
            told["data"][0]["accepts"] = ["cache_control"]
            response.body = orjson.dumps(told)
        return response

    def last(self) -> Any:
        return orjson.loads(self.received[-1].body)


async def call(gateway: Gateway, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else orjson.dumps(body)
    async with gateway.session.request(method, gateway.address(path), data=data, headers=sent) as response:
        return response.status, await response.json()


async def test_a_stored_beginning_is_put_in_front_of_what_names_it() -> None:
    engine = Engine("a", DONE)
    async with running(engine) as gateway:
        status, made = await call(gateway, "POST", CACHES, {**STORED, "ttl": "300s", "displayName": "book"})
        assert (status, made["model"], made["displayName"]) == (200, "m", "book")
        assert made["usageMetadata"]["totalTokenCount"] > 500
        assert await call(gateway, "GET", "/v1/" + made["name"]) == (200, made)
        asked = {"messages": ASK, "cached_content": made["name"], "max_tokens": 5, "seed": 1}
        assert (await call(gateway, "POST", CHAT, asked))[0] == 200
        whole = [{"role": "system", "content": "Be brief."}, *STORED["messages"], *ASK]
        assert engine.last() == {"messages": whole, "max_tokens": 5, "seed": 1, "model": "m"}
        assert (await call(gateway, "POST", MESSAGES, asked))[0] == 200
        told = engine.last()
        assert (told["system"], told["messages"], "cached_content" in told) == ("Be brief.", whole[1:], False)
        plain = {"messages": [{"role": "user", "content": 'the word "cached_content"'}], "model": "m"}
        await call(gateway, "POST", CHAT, plain)
        assert engine.last() == plain
        assert (await call(gateway, "POST", CHAT, {**plain, "cached_content": None}))[0] == 200
        assert engine.last() == plain, "null asks for no cache, and engines do not know the field"
        explained = await gateway.post(asked, path="/v1/route/explain")
        spelt_out = await gateway.post({"model": "m", "messages": whole}, path="/v1/route/explain")
        assert explained.json["prefix_keys"] == spelt_out.json["prefix_keys"] > 10
        unknown = {**asked, "cached_content": "caches/" + "0" * 32}
        missing = await gateway.post(unknown, path="/v1/route/explain")
        assert (missing.status, missing.json["error"]["code"]) == (404, "cache_not_found")


@pytest.mark.parametrize("left_out", ["system", "messages"])
async def test_a_system_prompt_or_messages_alone_can_be_stored(left_out: str) -> None:
    engine = Engine("a", DONE)
    async with running(engine) as gateway:
        contents = {name: value for name, value in STORED.items() if name != left_out}
        status, made = await call(gateway, "POST", CACHES, contents)
        assert status == 200
        assert (await call(gateway, "POST", MESSAGES, {"messages": ASK, "cached_content": made["name"]}))[0] == 200
        assert engine.last()["messages"] == [*contents.get("messages", []), *ASK]
        assert engine.last().get("system") == contents.get("system")


async def test_an_engine_that_keeps_marks_is_asked_to_keep_the_contents() -> None:
    engine = Engine("a", DONE)
    engine.keeps = True
    async with running(engine) as gateway:
        for ttl, kept in (("300s", "5m"), ("2000s", "1h")):
            made = (await call(gateway, "POST", CACHES, {**STORED, "ttl": ttl}))[1]
            await call(gateway, "POST", CHAT, {"messages": ASK, "cached_content": made["name"]})
            marked = {"type": "text", "text": BOOK, "cache_control": {"type": "ephemeral", "ttl": kept}}
            assert engine.last()["messages"][1] == {"role": "user", "content": [marked]}


@pytest.mark.parametrize(("in_contents", "in_body", "marks"), [(0, 3, 4), (3, 0, 4), (2, 1, 4), (0, 4, 4), (2, 2, 4)])
async def test_with_the_mark_of_its_cache_a_request_has_no_more_marks_than_engines_take(
    in_contents: int, in_body: int, marks: int
) -> None:
    def texts(count: int) -> list[dict[str, Any]]:
        block = {"type": "text", "text": BOOK, "cache_control": {"type": "ephemeral"}}
        return [{"role": "user", "content": [block, {"type": "text", "text": "And this."}]}] * count

    engine = Engine("a", DONE)
    engine.keeps = True
    async with running(engine) as gateway:
        stored = {**STORED, "messages": [*texts(in_contents), *STORED["messages"]]}
        name = (await call(gateway, "POST", CACHES, stored))[1]["name"]
        asked = {"messages": [*texts(in_body), *ASK], "cached_content": name}
        assert (await call(gateway, "POST", CHAT, asked))[0] == 200
        assert engine.received[-1].body.count(b'"cache_control"') == marks


async def test_changes_lists_pages_and_ends() -> None:
    async with running(Engine("a", DONE)) as gateway:
        names = [(await call(gateway, "POST", CACHES, {**STORED, "ttl": "60s"}))[1]["name"] for _ in range(5)]
        assert len(set(names)) == 5
        seen, token = [], ""
        while True:
            page = (await call(gateway, "GET", f"{CACHES}?pageSize=2&pageToken={token}"))[1]
            seen += [one["name"] for one in page["cachedContents"]]
            if not (token := page.get("nextPageToken", "")):
                break
        assert sorted(seen) == sorted(names)
        path = "/v1/" + names[0]
        before = (await call(gateway, "GET", path))[1]
        until = (datetime.now(UTC) + timedelta(hours=3)).replace(microsecond=0)
        after = (await call(gateway, "PATCH", path, {"expireTime": until.isoformat()}))[1]
        assert datetime.fromisoformat(after["expireTime"]) == until
        assert after["updateTime"] > before["updateTime"]
        assert await call(gateway, "DELETE", path) == (200, {})
        for method, body in (("GET", None), ("PATCH", {"ttl": "5s"}), ("DELETE", None)):
            status, answer = await call(gateway, method, path, body)
            assert (status, answer["error"]["code"]) == (404, "cache_not_found")
        asked = {"messages": ASK, "cached_content": names[0], "max_tokens": 1}
        status, answer = await call(gateway, "POST", CHAT, asked)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (
            *(404, "cached_content"),
            "cache_not_found",
        )
        status, answer = await call(gateway, "POST", MESSAGES, asked)
        assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**STORED, "model": None}, "model"),
        ({**STORED, "model": ""}, "model"),
        ({**STORED, "model": 5}, "model"),
        ({"model": "m"}, "messages"),
        ({**STORED, "contents": []}, "contents"),
        ({**STORED, "messages": "x"}, "messages"),
        ({**STORED, "messages": [{"content": "x"}]}, "messages[0].role"),
        ({**STORED, "messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({**STORED, "system": 7}, "system"),
        ({**STORED, "tools": [7]}, "tools"),
        ({**STORED, "displayName": "x" * 129}, "displayName"),
        ({**STORED, "ttl": "5m"}, "ttl"),
        ({**STORED, "ttl": "0s"}, "ttl"),
        ({**STORED, "ttl": 300}, "ttl"),
        ({**STORED, "ttl": "999999999s"}, "ttl"),
        ({**STORED, "ttl": "5s", "expireTime": "2999-01-01T00:00:00Z"}, "ttl"),
        ({**STORED, "expireTime": "2001-01-01T00:00:00Z"}, "expireTime"),
        ({**STORED, "expireTime": "2999-01-01"}, "expireTime"),
    ],
)
async def test_what_cannot_be_stored_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with running(Engine("a", DONE)) as gateway:
        status, answer = await call(gateway, "POST", CACHES, body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (MESSAGES, {"system": "Else."}, "system"),
        (CHAT, {"model": "other"}, "model"),
        (CHAT, {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": "x"}, "cached_content"),
        (CHAT, {"cached_content": 7}, "cached_content"),
        (CHAT, {"cached_content": "handbook"}, "cached_content"),
    ],
)
async def test_requests_that_cannot_go_on_from_a_cache_are_refused_by_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with running(Engine("a", DONE)) as gateway:
        name = (await call(gateway, "POST", CACHES, STORED))[1]["name"]
        status, answer = await call(gateway, "POST", path, {"messages": ASK, "cached_content": name, **fields})
        assert status == 400
        assert param in answer["error"].get("param", answer["error"]["message"])


async def test_what_is_nested_deeper_than_can_be_written_is_refused() -> None:
    def nested(fields: dict[str, Any]) -> bytes:
        """The fields, and one more that is nested as deeply as orjson reads and deeper than it writes."""
        return orjson.dumps(fields)[:-1] + b',"user":' + b"[" * 500 + b"]" * 500 + b"}"

    engine = Engine("a", DONE)
    async with running(engine) as gateway:
        name = (await call(gateway, "POST", CACHES, STORED))[1]["name"]
        deep = nested({"role": "user"})
        for path, body in (
            (CACHES, b'{"model":"m","messages":[%b]}' % deep),
            (CHAT, nested({"messages": ASK, "cached_content": name})),
            (CHAT, nested({"model": "m", "messages": ASK, "cached_content": None})),
        ):
            answer = await gateway.post(body, path=path)
            assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        assert not engine.received


async def test_errors_name_the_bounds_and_nothing_is_stored_if_caches_are_off() -> None:
    async with running(Engine("a", DONE), named_caches=2, named_cache_mib=1) as gateway:
        large = {**STORED, "system": "x" * (MIB - 5000)}
        assert (await call(gateway, "POST", CACHES, STORED))[0] == 200
        status, answer = await call(gateway, "POST", CACHES, large)
        assert (status, answer["error"]["code"]) == (400, "caches_too_large")
        assert "a tenant may have 1" in answer["error"]["message"]
        assert (await call(gateway, "POST", CACHES, STORED))[0] == 200
        status, answer = await call(gateway, "POST", CACHES, STORED)
        assert (status, answer["error"]["code"]) == (400, "too_many_caches")
        assert "--named-caches" in answer["error"]["message"]
        assert (await call(gateway, "POST", CACHES, {**STORED, "model": "nosuch"}))[0] == 404
    async with running(Engine("a", DONE), named_caches=0) as gateway:
        status, answer = await call(gateway, "POST", CACHES, STORED)
        assert (status, "--named-caches" in answer["error"]["message"]) == (400, True)


async def test_a_tenant_sees_nothing_of_anothers(tmp_path: Path, no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")}
    tenants = tmp_path / "tenants"
    tenants.write_text(
        "tenants:\n" + "".join(f"  - name: {name}\n    keys: [{{sha256: {digest[name]}}}]\n" for name in digest)
    )
    async with running(Engine("a", DONE), tenants_file=str(tenants)) as gateway:
        name = (await call(gateway, "POST", CACHES, STORED, key="one"))[1]["name"]
        assert (await call(gateway, "GET", CACHES, key="two"))[1]["cachedContents"] == []
        for method, body in (("GET", None), ("PATCH", {"ttl": "5s"}), ("DELETE", None)):
            assert (await call(gateway, method, "/v1/" + name, body, key="two"))[0] == 404
        asked = {"messages": ASK, "cached_content": name}
        assert (await call(gateway, "POST", CHAT, asked, key="two"))[0] == 404
        assert (await call(gateway, "POST", CHAT, asked, key="one"))[0] == 200
        assert (await call(gateway, "GET", CACHES))[0] == 401


@pytest.mark.realtime
async def test_any_gateway_asks_the_pod_that_has_the_cache_and_another_one_when_that_dies(
    redis_server: RedisServer, no_blocking_calls: BlockBuster
) -> None:
    no_blocking_calls.deactivate()
    one, two = Engine("a", DONE), Engine("b", DONE)
    shared: dict[str, Any] = {"redis_url": redis_server.url, "policy": "cache_aware"}
    async with running(one, two, **shared) as gateway:
        name = (await call(gateway, "POST", CACHES, STORED))[1]["name"]
        asked = {"messages": ASK, "cached_content": name}
        for _ in range(4):
            assert (await call(gateway, "POST", CHAT, asked))[0] == 200
        first, other = sorted((one, two), key=lambda engine: -len(engine.received))
        assert (len(first.received), len(other.received)) == (4, 0)
        await first.stop()
        assert (await call(gateway, "POST", CHAT, asked))[0] == 200
        assert other.last()["messages"][1:] == [*STORED["messages"], *ASK]
    third = Engine("c", DONE)
    async with running(third, **shared) as restarted:  # this engine has never seen the contents
        assert (await call(restarted, "POST", CHAT, asked))[0] == 200
        assert third.last()["messages"][1:] == [*STORED["messages"], *ASK]
        assert (await call(restarted, "DELETE", "/v1/" + name))[0] == 200
        assert (await call(restarted, "POST", CHAT, asked))[0] == 404


TEXTS = st.text(max_size=8)
CONTENTS = TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": CONTENTS}), max_size=3
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(system=CONTENTS, stored=TURNS, own=TURNS.filter(bool), mark_s=st.sampled_from([None, 10.0, 1000.0]))
def test_a_request_has_the_keys_of_the_whole_chat_marked_or_not(
    system: Any, stored: list[Any], own: list[Any], mark_s: float | None
) -> None:
    """So the request is sent to a pod that holds these keys, and is rendered like the whole chat."""
    fields = {"model": "m", "system": system, "messages": stored}
    try:
        contents = orjson.loads(parse_new(fields, NOW_S, 100.0).contents)
    except BadRequest:
        assert not system
        assert not stored
        return
    whole = [*([{"role": "system", "content": system}] if system else []), *stored, *own]
    meta = CacheMeta(new_id(), "m", "", 0, 0, 1, 2, 3)
    for endpoint in (Endpoint.CHAT, Endpoint.MESSAGES):
        body = expanded(endpoint, {"messages": own, "cached_content": "x"}, meta, contents, mark_s=mark_s)
        assert request_head(endpoint, orjson.loads(body)).canonical == canonical_chat(whole, [])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "system", "tools", "ttl", "expireTime", "displayName", "x"]),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | TEXTS
            | st.sampled_from(["5s", "1e400s", "9999-12-31T23:59:59Z"]),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_whatever_is_sent_is_stored_or_refused(fields: dict[str, Any]) -> None:
    try:
        wanted = parse_new(fields, NOW_S, 100.0)
    except ApiError:
        return
    assert wanted.until_s > NOW_S
    assert parse_expiry({"ttl": "1.5s"}, NOW_S, 100.0) == NOW_S + 1.5
    assert orjson.loads(wanted.contents)


async def test_a_body_that_is_too_large_with_its_contents_is_refused() -> None:
    engine = Engine("a", DONE)
    async with running(engine, max_in_flight_body_mib=2, max_body_bytes=MIB) as gateway:
        name = (await call(gateway, "POST", CACHES, {**STORED, "system": "x" * (MIB - 20_000)}))[1]["name"]
        asked = {"messages": [{"role": "user", "content": "y" * 30_000}], "cached_content": name}
        status, answer = await call(gateway, "POST", CHAT, asked)
        assert (status, answer["error"]["param"]) == (413, "cached_content")
        assert not engine.received


async def test_contents_count_among_the_bodies_in_flight() -> None:
    engine = Engine("a", DONE)
    async with running(engine, max_in_flight_body_mib=2, max_body_bytes=MIB) as gateway:
        name = (await call(gateway, "POST", CACHES, {**STORED, "system": "x" * (MIB // 2 + 100_000)}))[1]["name"]
        engine.script = stalls_after(begin=False)
        asked = {"messages": ASK, "cached_content": name}
        calls = [asyncio.create_task(call(gateway, "POST", CHAT, asked)) for _ in range(3)]
        await eventually(lambda: engine.open == 3)
        status, answer = await call(gateway, "POST", CHAT, asked)
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        for task in calls:
            task.cancel()
        await eventually(lambda: gateway.in_flight == 0)
        engine.script = DONE
        assert (await call(gateway, "POST", CHAT, asked))[0] == 200
