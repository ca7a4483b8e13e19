"""What a probe over real connections tells about an engine, and what silence means while requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine.contract import headers
from router.fleet.faults import AT_WORK_S
from router.fleet.probe import HttpProbe, PodIdentity, ProbeFailed, served_models
from router.views.types import PodId
from tests.router.fleet.test_faults import fail, now_s, serve
from tests.router.fleet.test_fleet import World

SILENT = ProbeFailed("no answer in time", silent=True)
KEY = {"Authorization": "Bearer key"}


async def looked_at(
    url: str, *, timeout_s: float = 20.0, credentials: dict[str, str] | None = None
) -> PodIdentity | ProbeFailed:
    async with aiohttp.ClientSession() as session:
        try:
            return await HttpProbe(session, timeout_s, lambda _: credentials or {}).identify(url)
        except ProbeFailed as error:
            return error


@contextlib.asynccontextmanager
async def answering(answer: web.Response) -> AsyncIterator[str]:
    """Yield the URL of an engine that gives its probe this answer."""

    async def models(request: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_only_an_answer_that_does_not_come_is_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:  # accepts, and never answers
        late = await looked_at(f"http://127.0.0.1:{hung.getsockname()[1]}", timeout_s=0.05)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        refused = await looked_at(f"http://127.0.0.1:{bound.getsockname()[1]}")
    failures = [late, refused]
    for answer in (web.Response(status=500), web.Response(status=503), web.Response(text="<html>")):
        async with answering(answer) as url:
            failures.append(await looked_at(url))
    assert all(isinstance(failure, ProbeFailed) for failure in failures)
    assert [isinstance(failure, ProbeFailed) and failure.silent for failure in failures] == [True] + [False] * 4


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_a_name_that_no_host_can_have_is_a_failed_probe(host: str) -> None:
    assert isinstance(await looked_at(f"http://{host}:8000"), ProbeFailed)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("credentials", "said"), [({}, "it needs a key"), (KEY, "it refuses the key")])
async def test_an_engine_that_wants_a_key_leads_to_the_flag(
    status: int, credentials: dict[str, str], said: str
) -> None:
    async with answering(web.Response(status=status)) as url:
        failure = await looked_at(url, credentials=credentials)
    assert isinstance(failure, ProbeFailed)
    assert failure.protected
    assert f"answered {status}: {said}" in str(failure)
    assert "--engine-api-key-file" in str(failure)


@pytest.mark.looptime
async def test_a_probe_that_waits_behind_requests_does_not_count() -> None:
    """A full engine takes seconds to answer a probe while it answers requests. It is neither ejected nor forgotten."""
    world = World()
    async with world.running():
        pods = world.fleet.pods("m")
        world.probe.pods = dict.fromkeys(world.probe.pods, SILENT)
        for _ in range(100):
            for pod in pods:
                serve(world.fleet, pod)
            await asyncio.sleep(AT_WORK_S + 1.5)  # so that some probes do count, but never three in a row
            assert world.fleet.pods("m") == pods
        world.probe.takes_s = 0.5  # silence counts from the end of the probe
        for pod in pods:
            serve(world.fleet, pod)
        await asyncio.sleep(AT_WORK_S)
        assert world.fleet.pods("m") == pods
        await asyncio.sleep(3 * (1.2 + 0.5))
        assert world.fleet.pods("m") == (), "nothing has come from the engines since"


@pytest.mark.looptime
async def test_streams_that_end_are_a_sign_of_life_too() -> None:
    world = World("http://a")
    async with world.running():
        (pod,) = world.fleet.pods("m")
        sent_s = now_s()
        world.probe.pods["http://a"] = SILENT
        for _ in range(10):
            await asyncio.sleep(2)
            world.fleet.served(pod, sent_s=sent_s)
        assert world.ids() == ["a"]


@pytest.mark.looptime
@pytest.mark.parametrize("requests", ["none", "failing"])
async def test_a_pod_that_hangs_goes_as_soon_as_ever(requests: str) -> None:
    world = World("http://a")
    async with world.running():
        (pod,) = world.fleet.pods("m")
        world.probe.pods["http://a"] = SILENT
        for i in range(19):
            if requests == "failing":
                fail(world.fleet, pod, is_begun=i % 2 == 0)
            await asyncio.sleep(0.2)
        assert world.ids() == []


@pytest.mark.looptime
@pytest.mark.parametrize("failure", [ProbeFailed("connection refused"), RuntimeError("odd")], ids=["refused", "odd"])
async def test_other_failures_count_however_well_requests_go(failure: Exception) -> None:
    world = World("http://a")
    async with world.running():
        (pod,) = world.fleet.pods("m")
        world.probe.pods["http://a"] = failure
        for _ in range(37):
            serve(world.fleet, pod)
            await asyncio.sleep(0.1)
        assert world.ids() == []


def answer_of(made_s: int, root: str = "org/m") -> PodIdentity:
    """Return an engine's answer made at this time: two models, one with a random part."""
    card = b'{"id": "m", "root": "%s", "created": %d, "permission": [{"id": "perm-%d"}]}' % (
        root.encode(),
        made_s,
        made_s,
    )
    return PodIdentity(PodId("a"), None, served_models(b'{"data": [%s, {"id": "n", "created": 1}]}' % card)[0])


@pytest.mark.looptime
async def test_what_is_new_in_every_answer_changes_nothing() -> None:
    world = World("http://a")
    world.probe.pods["http://a"] = answer_of(0)
    async with world.running():
        count = len(world.changes)
        for made_s in range(1, 10):
            world.probe.pods["http://a"] = answer_of(made_s)
            await asyncio.sleep(1)
        assert len(world.probe.seen["http://a"]) > 5
        assert len(world.changes) == count, "the table is made anew"
        assert b"perm-0" in world.fleet.models()["m"].card, "clients see the whole card"
        world.probe.pods["http://a"] = answer_of(9, "other/m")
        await asyncio.sleep(1.3)
        assert b"other/m" in world.fleet.models()["m"].card
        assert len(world.changes) == count + 1


async def test_an_engine_hears_how_many_the_gateway_follows() -> None:
    heard: list[str | None] = []

    async def models(request: web.Request) -> web.Response:
        heard.append(request.headers.get(headers.PODS))
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    sizes = iter((3, 1000))
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        probe = HttpProbe(session, 5.0, pods=lambda: next(sizes))
        for _ in range(2):
            await probe.identify(str(server.make_url("")).rstrip("/"))
    assert heard == ["3", "1000"]
