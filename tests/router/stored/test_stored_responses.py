"""Responses that an engine keeps are fetched, listed, cancelled and deleted at the pod that has them."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster

from router.startup.parts import PLACES
from tests.redis_server import RedisServer
from tests.router.endpoints.test_responses import PATH, client_of, response, told
from tests.router.rig.helpers import Gateway, ScriptedEngine, running

HI: Any = {"model": "m", "input": "Hi."}


class Keeper(ScriptedEngine):
    """Keeps responses as vLLM with its store does; `full`: with the paths that vLLM lacks."""

    def __init__(self, pod: str, *, full: bool = True, models: tuple[str, ...] = ("m",)) -> None:
        super().__init__(pod, self._create, models=models)
        self.full = full
        self.kept: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/responses/{id}", self._get)
        app.router.add_post("/v1/responses/{id}/cancel", self._cancel)
        if self.full:
            app.router.add_delete("/v1/responses/{id}", self._delete)
            app.router.add_get("/v1/responses/{id}/input_items", self._items)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        fields = orjson.loads(await request.read())
        name = f"resp_{self.pod}{len(self.kept)}"
        is_later = bool(fields.get("background"))
        said = response(name, None if is_later else "Hi.", background=is_later)
        if is_later:
            said["status"] = "queued"
        self.kept[name] = said
        return web.json_response(said)

    def _found(self, request: web.Request) -> dict[str, Any]:
        self.asked.append(f"{request.method} {request.path_qs}")
        name = request.match_info["id"]
        if name not in self.kept:
            body = {"message": f"Response with id '{name}' not found.", "type": "invalid_request_error"}
            text = orjson.dumps({"error": {**body, "param": "response_id", "code": 404}}).decode()
            raise web.HTTPNotFound(text=text, content_type="application/json")
        return self.kept[name]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        found = self._found(request)
        if request.query.get("stream") != "true":
            return web.json_response(found)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for event in told(found["id"], ["Well, ", "hello."])[int(request.query.get("starting_after", "-1")) + 1 :]:
            await answer.write(event)
        return answer

    async def _cancel(self, request: web.Request) -> web.Response:
        found = self._found(request)
        if found["status"] != "queued":
            body = {"message": "Cannot cancel a synchronous response.", "type": "invalid_request_error"}
            return web.json_response({"error": {**body, "param": "response_id", "code": 400}}, status=400)
        found["status"] = "cancelled"
        return web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        found = self._found(request)
        del self.kept[found["id"]]
        return web.json_response({"id": found["id"], "object": "response", "deleted": True})

    async def _items(self, request: web.Request) -> web.Response:
        self._found(request)
        item = {"id": "msg_0", "type": "message", "role": "user", "status": "completed"}
        data = [{**item, "content": [{"type": "input_text", "text": "Hi."}]}]
        listed = {"object": "list", "data": data, "first_id": "msg_0", "last_id": "msg_0", "has_more": False}
        return web.json_response(listed)


async def test_the_official_client_finds_what_it_stored(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engines = [Keeper(pod) for pod in "abc"]
    async with running(*engines) as gateway, client_of(gateway) as client:
        made = [await client.responses.create(**HI) for _ in range(6)]
        for one in made:
            again = await client.responses.retrieve(one.id)
            assert (again.id, again.output_text) == (one.id, "Hi.")
            words = ""
            async for event in await client.responses.retrieve(one.id, stream=True, starting_after=0):
                if event.type == "response.output_text.delta":
                    words += event.delta
            assert words == "Well, hello."
            items = [item async for item in client.responses.input_items.list(one.id, limit=5)]
            assert [item.id for item in items] == ["msg_0"]
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await client.responses.cancel(one.id)
            await client.responses.delete(one.id)
            with pytest.raises(openai.NotFoundError) as gone:
                await client.responses.retrieve(one.id)
            assert (gone.value.code, gone.value.param) == ("response_not_found", "response_id")
        later = await client.responses.create(**HI, background=True)
        assert later.status == "queued"
        assert (await client.responses.retrieve(later.id)).status == "queued"
        assert (await client.responses.cancel(later.id)).status == "cancelled"
        metrics = (await gateway.get("/metrics")).body.decode()
        assert 'warmroute_gateway_tokens_total{kind="prompt",policy="round_robin"} 0' not in metrics
    assert all(engine.asked for engine in engines)
    asked = [one for engine in engines for one in engine.asked]
    assert "GET /v1/responses/resp_a0?stream=true&starting_after=0" in [
        one.replace("starting_after=0&stream=true", "stream=true&starting_after=0") for one in asked
    ]


async def test_what_nobody_knows_and_what_is_gone_is_said_plainly() -> None:
    engines = [Keeper("a"), Keeper("b")]
    async with running(*engines, eject_after=1) as gateway:
        for name in ("resp_of_nobody", "resp%20x", "x" * 300, "..%2f..%2fmetrics"):
            unknown = await gateway.get(f"/v1/responses/{name}")
            assert (unknown.status, unknown.json["error"]["code"]) == (404, "response_not_found"), name
        assert not engines[0].asked + engines[1].asked
        made = await gateway.post(HI, path=PATH)
        name, port = made.json["id"], int(engines["ab".index(made.pod)].url.rpartition(":")[2])
        assert (await gateway.get(f"/v1/responses/{name}")).pod == made.pod
        await engines["ab".index(made.pod)].stop()
        await gateway.wait_pods(1)
        away = await gateway.get(f"/v1/responses/{name}")
        assert (away.status, away.json["error"]["code"]) == (503, "no_engine")
        assert away.headers["Retry-After"]
        other = Keeper("c")
        await other.start(port)
        try:
            await gateway.wait_pods(2)
            gone = await gateway.get(f"/v1/responses/{name}")
            assert (gone.status, gone.json["error"]["code"]) == (404, "response_not_found")
            assert "the engine that had it is gone" in gone.json["error"]["message"]
            assert not other.asked
        finally:
            await other.stop()


async def test_a_path_that_an_engine_has_not_is_told_by_it_and_others_go_on() -> None:
    engine = Keeper("a", full=False)
    async with running(engine) as gateway:
        made = await gateway.post(HI, path=PATH)
        url = f"{gateway.url}/v1/responses/{made.json['id']}"
        async with gateway.session.delete(url) as refused:
            assert refused.status == 405
        assert (await gateway.get(f"/v1/responses/{made.json['id']}/input_items")).status in (404, 405)
        assert (await gateway.get(f"/v1/responses/{made.json['id']}")).status == 200
        async with gateway.session.put(url) as refused:
            assert refused.status == 405
        assert engine.asked == [f"GET /v1/responses/{made.json['id']}"]


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    entries = [{"name": name, "keys": [{"sha256": sha256(name.encode()).hexdigest()}]} for name in ("one", "two")]
    path.write_bytes(orjson.dumps({"tenants": entries}))
    return str(path)


@pytest.mark.parametrize("pods", ["a", "ab"])
async def test_one_tenant_never_reaches_anothers_response(tenants_file: str, pods: str) -> None:
    """This also holds with a single pod, which would answer because it knows no tenants."""
    engines = [Keeper(pod) for pod in pods]
    async with running(*engines, tenants_file=tenants_file) as gateway:
        one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
        made = await gateway.post(HI, path=PATH, **one)
        name = made.json["id"]
        begun = await gateway.post({**HI, "conversation": "c1"}, path=PATH, **one)
        assert begun.status == 200
        before = [len(engine.kept) for engine in engines]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            url = f"{gateway.url}/v1/responses/{name}{path}"
            async with gateway.session.request(method, url, headers=two) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (404, "response_not_found")
        refused_turn = await gateway.post({**HI, "previous_response_id": name}, path=PATH, **two)
        assert (refused_turn.status, refused_turn.json["error"]["param"]) == (404, "previous_response_id")
        unknown = await gateway.post({**HI, "previous_response_id": "resp_x"}, path=PATH, **two)
        assert unknown.status == 404, "a pod that does not know the response's owner was asked"
        assert [len(engine.kept) for engine in engines] == before
        assert not [asked for engine in engines for asked in engine.asked]
        async with gateway.session.get(f"{gateway.url}/v1/responses/{name}", headers=one) as found:
            assert found.status == 200


class Remembers(ScriptedEngine):
    """Keeps conversations by name, as an engine does that knows no tenants."""

    def __init__(self, pod: str) -> None:
        super().__init__(pod, self._turn)
        self.turns: dict[str, list[str]] = {}

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        fields = orjson.loads(await request.read())
        given = fields["conversation"]
        name = given if isinstance(given, str) else given["id"]
        turns = self.turns.setdefault(name, [])
        turns.append(fields["input"])
        return web.json_response(
            {**response(f"resp_{len(name)}{len(turns)}", " ".join(turns)), "conversation": {"id": name}}
        )


@pytest.mark.parametrize("pods", ["a", "ab"])
async def test_two_tenants_use_one_name_of_a_conversation_at_the_same_time_and_ever_after(
    tenants_file: str, pods: str
) -> None:
    """Neither a restart of the gateway nor an expiry mixes them, and the name in an answer goes on."""
    engines = [Remembers(pod) for pod in pods]
    keys = [{"Authorization": f"Bearer {name}"} for name in ("one", "two")]
    names: Any = ["support-1"] * 2
    told: list[list[str]] = [[], []]
    for _ in range(3):  # each time a new gateway, which knows nothing of the last one
        for engine in engines:
            await engine.start()
        async with running(*engines, tenants_file=tenants_file) as gateway:
            for is_expired in (False, True):
                for at, key in enumerate(keys):
                    words = f"{at}.{len(told[at])}"
                    fields = {"model": "m", "input": words, "conversation": names[at]}
                    answer = await gateway.post(fields, path=PATH, **key)
                    assert answer.status == 200
                    told[at].append(words)
                    names[at] = ["support-1", {"id": "support-1"}, answer.json["conversation"]][len(told[at]) % 3]
                if is_expired:
                    gateway.app[PLACES]._known.clear()
            if pods == "a":
                assert answer.json["output"][0]["content"][0]["text"].split() == told[1]
    kept: dict[str, set[str]] = {}
    for engine in engines:
        for name, turns in engine.turns.items():
            kept.setdefault(name, set()).update(turns)
    assert sorted(map(sorted, kept.values())) == told


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text("plain-key-0123456789")
    return str(tmp_path / "keys")


async def test_the_default_tenant_is_a_tenant_where_there_are_others(tenants_file: str, keys_file: str) -> None:
    """Its keys are in another file. A single pod would give it anybody's response."""
    engine = Keeper("a")
    async with running(engine, tenants_file=tenants_file, api_keys_file=keys_file) as gateway:
        name = (await gateway.post(HI, path=PATH, Authorization="Bearer one")).json["id"]
        gateway.app[PLACES].forget(name)
        taken = await gateway.post(
            {**HI, "previous_response_id": name}, path=PATH, Authorization="Bearer plain-key-0123456789"
        )
        assert (taken.status, len(engine.kept)) == (404, 1)


async def test_an_engine_that_gives_one_id_twice_does_not_give_away_the_first_owners_response(
    tenants_file: str,
) -> None:
    async def always_one(request: web.Request) -> web.StreamResponse:
        return web.json_response(response("resp_1", "Hi."))

    async with running(ScriptedEngine("a", always_one), tenants_file=tenants_file) as gateway:
        for name in ("one", "two"):
            assert (await gateway.post(HI, path=PATH, Authorization=f"Bearer {name}")).status == 200
        place = gateway.app[PLACES].known("resp_1")
        assert place is not None
        assert place.tenant == "one"


async def test_a_conversation_with_the_id_of_a_response_gives_no_right_to_that(tenants_file: str) -> None:
    """Clients name conversations themselves, and the gateway forgets after a while which pod has a response."""
    engine = Keeper("a")
    async with running(engine, tenants_file=tenants_file) as gateway:
        one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
        name = (await gateway.post(HI, path=PATH, **one)).json["id"]
        gateway.app[PLACES].forget(name)
        assert (await gateway.post({**HI, "conversation": name}, path=PATH, **two)).status == 200
        assert (await gateway.post({**HI, "previous_response_id": name}, path=PATH, **two)).status == 404
        async with gateway.session.get(f"{gateway.url}/v1/responses/{name}", headers=two) as refused:
            assert refused.status == 404
        assert not engine.asked


@pytest.mark.realtime
async def test_another_gateway_finds_it_and_hears_that_it_was_deleted(
    redis_server: RedisServer, no_blocking_calls: BlockBuster
) -> None:
    no_blocking_calls.deactivate()  # the Redis client reads versions of packages from disk
    shared: dict[str, Any] = {"redis_url": redis_server.url}
    engines = [Keeper("a"), Keeper("b")]
    async with (
        running(*engines, **shared) as one,
        running(*engines, **shared) as two,
        running(*engines, **shared) as three,
    ):
        made = await one.post(HI, path=PATH)
        path = f"/v1/responses/{made.json['id']}"

        async def until(status: int, where: Gateway) -> None:
            async with asyncio.timeout(20):
                while (await where.get(path)).status != status:  # noqa: ASYNC110  # Redis can only be polled
                    await asyncio.sleep(0.05)

        await until(200, two)
        async with two.session.delete(two.url + path) as deleted:
            assert deleted.status == 200
        await until(404, three)
        assert (await one.get(path)).status == 404  # this gateway still knows the pod, which answers 404
