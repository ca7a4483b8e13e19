"""A ready gateway knows what it needs to route. It distinguishes absent engines from models that never existed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.fleet.discovery import DiscoveryStatus, EngineAddress
from router.startup import app as app_module
from router.startup.parts import FLEET
from router.startup.serving import build_metrics_app, make_runner, operators_connections
from tests.router.rig.helpers import (
    Gateway,
    ScriptedEngine,
    app_of,
    event,
    eventually,
    knows_ranks,
    serving_admin,
    stalls_after,
    streams,
)

GOOD = streams([event("a"), b"data: [DONE]\n\n"])


class ScriptedDiscovery:
    """Discovers the sets that a test puts into it, with the test's status."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[frozenset[EngineAddress]] = asyncio.Queue()
        self.state = DiscoveryStatus(None)

    def put(self, *engines: ScriptedEngine) -> None:
        self.state = DiscoveryStatus(asyncio.get_running_loop().time(), relists={"start": 1})
        self.sets.put_nowait(frozenset(EngineAddress(engine.url) for engine in engines))

    def status(self) -> DiscoveryStatus:
        return self.state

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        while True:
            yield await self.sets.get()


@contextlib.asynccontextmanager
async def following(
    discovery: ScriptedDiscovery, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose engines come from `discovery`."""
    monkeypatch.setattr(app_module, "make_discovery", lambda *_: discovery)
    values = {"kube_selector": "app=engine", "probe_interval_s": 0.1, **settings}
    app = app_of(**values)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session, serving_admin(app) as admin:
            yield Gateway(app, runner, session, admin)
    finally:
        await runner.cleanup()


def ask(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "x", "stream": True}


async def text_of(gateway: Gateway) -> str:
    return (await gateway.get("/metrics")).body.decode()


async def test_unready_until_discovery_has_a_first_set_and_ready_with_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovery = ScriptedDiscovery()
    async with following(discovery, monkeypatch) as gateway:
        discovery.state = DiscoveryStatus(None, "forbidden: no Role", errors=2, relists={"start": 1, "forbidden": 1})
        assert (await gateway.ready_for_operators())["missing"] == ["the engines are not known yet: forbidden: no Role"]
        ready = await gateway.get("/ready")
        assert ready.status == 503
        assert ready.json["missing"][0].startswith("the engines are not known yet: forbidden: ")
        assert b"no Role" not in ready.body, "anybody may ask at the clients' port"
        assert ready.json["discovery"]["synced"] is False
        assert "warmroute_gateway_discovery_synced 0.0" in await text_of(gateway)
        discovery.put()
        await eventually(lambda: gateway.app[FLEET].is_probed)
        ready = await gateway.get("/ready")
        assert (ready.status, ready.json["pods"]) == (200, {"known": 0, "admitted": 0, "ejected": 0})
        assert (ready.json["registry"]["configured"], ready.json["registry"]["connected"]) == (False, False)
        answer = await gateway.post(ask("m"))
        assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (503, True)
        assert answer.json["error"]["type"] == "service_unavailable_error"


async def test_an_engine_that_answers_and_is_not_ready_is_told_from_one_that_takes_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = [ScriptedEngine(name, GOOD) for name in "ab"]
    discovery = ScriptedDiscovery()
    async with following(discovery, monkeypatch) as gateway:
        for engine in engines:
            await engine.start()
        discovery.put(*engines)
        await gateway.wait_pods(2)
        ends = EngineAddress(engines[0].url, is_ready=False)
        discovery.sets.put_nowait(frozenset((ends, EngineAddress(engines[1].url))))
        await gateway.wait_pods(1)
        shown = (await gateway.get("/v1/pods")).json["pods"]
        assert {pod["pod"]: (pod["ready"], pod["admitted"]) for pod in shown} == {"a": (False, True), "b": (True, True)}
        assert (await gateway.get("/ready")).json["pods"] == {"known": 2, "admitted": 1, "ejected": 0}
    for engine in engines:
        await engine.stop()


async def test_unready_until_each_engine_of_the_first_set_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(ScriptedEngine):
        may_answer = asyncio.Event()

        async def _models(self, request: web.Request) -> web.Response:
            await self.may_answer.wait()
            return await super()._models(request)

    engine = Slow("a", GOOD)
    await engine.start()
    discovery = ScriptedDiscovery()
    async with following(discovery, monkeypatch, probe_timeout_s=30) as gateway:
        discovery.put(engine)
        await eventually(lambda: len(gateway.app[FLEET].members()) == 1)
        assert (await gateway.get("/ready")).json["missing"] == ["the engines have not been asked yet"]
        engine.may_answer.set()
        await gateway.wait_pods(1)
        await eventually(lambda: knows_ranks(gateway))
        assert (await gateway.get("/ready?engines=1")).status == 200
    await engine.stop()


async def test_a_model_scaled_to_zero_is_503_and_one_never_seen_404(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = ScriptedEngine("s", GOOD, models=["small"]), ScriptedEngine("l", GOOD, models=["large"])
    discovery = ScriptedDiscovery()
    async with following(discovery, monkeypatch, models=["asleep"]) as gateway:
        await small.start()
        await large.start()
        discovery.put(small, large)
        await gateway.wait_pods(1, "large")
        await gateway.wait_pods(1, "small")
        discovery.put(small)
        await gateway.wait_pods(0, "large")
        for model, status in (("small", 200), ("large", 503), ("asleep", 503), ("nowhere", 404)):
            answer = await gateway.post(ask(model))
            assert (answer.status, "Retry-After" in answer.headers) == (status, status == 503), model
        assert [card["id"] for card in (await gateway.get("/v1/models")).json["data"]] == ["small"]
        text = await text_of(gateway)
        for model, pods in (("small", 1), ("large", 0), ("asleep", 0)):
            assert f'warmroute_gateway_model_engines{{model="{model}"}} {pods}.0' in text
        for model in ("large", "asleep"):
            assert f'warmroute_gateway_unserved_total{{model="{model}"}} 1.0' in text
        assert "nowhere" not in text, "a name that only a client knows makes no time series"
        discovery.put(small, large)
        await gateway.wait_pods(1, "large")
        assert (await gateway.post(ask("large"))).status == 200
        discovery.put()
        await gateway.wait_pods(0, "small")
        assert (await gateway.post(ask("small"))).status == 503
    await small.stop()
    await large.stop()


async def test_the_state_of_discovery_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = ScriptedDiscovery()
    async with following(discovery, monkeypatch) as gateway:
        now_s = asyncio.get_running_loop().time()
        discovery.state = DiscoveryStatus(now_s - 100, "silent: gone", 3, {"start": 1, "silent": 3})
        text = await text_of(gateway)
        shown = (await gateway.ready_for_operators())["discovery"]
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert 100 <= float(lines["warmroute_gateway_discovery_sync_age_seconds"]) < 120
    assert lines["warmroute_gateway_discovery_synced"] == "1.0"
    assert lines["warmroute_gateway_discovery_errors_total"] == "3.0"
    assert lines['warmroute_gateway_discovery_relists_total{reason="silent"}'] == "3.0"
    assert 100 <= shown.pop("sync_age_s") < 120
    assert shown == {"synced": True, "errors": 3, "problem": "silent: gone", "pool_valid": None}


@pytest.mark.parametrize("engines", ["x", "-1", "1.5", "", "9999999"])
async def test_an_invalid_count_of_engines_is_refused(monkeypatch: pytest.MonkeyPatch, engines: str) -> None:
    async with following(ScriptedDiscovery(), monkeypatch) as gateway:
        answer = await gateway.get(f"/ready?engines={engines}")
    assert (answer.status, answer.json["error"]["param"]) == (400, "engines")


async def test_pods_show_their_requests_and_the_prediction_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, discovery = ScriptedEngine("a", GOOD), ScriptedDiscovery()
    await engine.start()
    async with following(discovery, monkeypatch) as gateway:
        discovery.put(engine)
        await gateway.wait_pods(1)
        assert (await gateway.post(ask("m"))).status == 200
        text = await text_of(gateway)
        counts = [line for line in text.splitlines() if line.startswith("warmroute_gateway_ttft_error_seconds_count")]
        assert [line.rsplit(" ", 1)[1] for line in counts] == ["1.0"], "the error is counted once, late or early"
        assert 'warmroute_gateway_engine_in_flight{engine="a"} 0.0' in text
        engine.script = stalls_after([event("a")])
        async with gateway.session.post(f"{gateway.url}/v1/completions", json=ask("m")) as answer:
            await answer.content.readany()
            assert 'warmroute_gateway_engine_in_flight{engine="a"} 1.0' in await text_of(gateway)
        await eventually(lambda: gateway.in_flight == 0)
        discovery.put()
        await gateway.wait_pods(0)
        assert 'engine="a"' not in "".join(
            line for line in (await text_of(gateway)).splitlines() if "engine_in_flight" in line
        ), "pods that have left leave no series"
    await engine.stop()


async def test_metrics_on_a_port_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = ScriptedDiscovery()
    async with following(discovery, monkeypatch) as gateway:
        connections = operators_connections(gateway.app)
        runner = make_runner(build_metrics_app(gateway.app, connections), connections)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with gateway.session.get(f"{url}/metrics") as answer:
            assert (answer.status, "warmroute_gateway_in_flight" in await answer.text()) == (200, True)
        async with gateway.session.get(f"{url}/v1/pods") as answer:
            assert answer.status == 404
        await runner.cleanup()
