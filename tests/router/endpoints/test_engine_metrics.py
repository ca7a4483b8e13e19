"""Engines with metrics of vLLM and SGLang behind a gateway, over real sockets: load, ranks, harmful pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import router.startup.app as app_module
from engine.common.sse import DONE
from engine.contract import headers
from router.fleet import scrape
from router.fleet.discovery import EngineAddress, StaticDiscovery
from router.fleet.scrape import MAX_PAGE_BYTES
from router.startup.parts import FLEET, SCRAPER
from tests.router.fleet.pages import Load, sglang_page, vllm_page
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    ScriptedEngine,
    event,
    eventually,
    knows_ranks,
    running,
    streams,
    usage_event,
)

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
RANK = headers.DATA_PARALLEL_RANK


class GivenRanks(StaticDiscovery):
    """Addresses with ranks, as annotations of pods give them."""

    def __init__(self, urls: Iterable[str], ranks: int) -> None:
        self._addresses = frozenset(EngineAddress(url, ranks=ranks) for url in urls)


def give_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(app_module, "make_discovery", lambda settings, _: GivenRanks(settings.engines, ranks))


class MeteredEngine(ScriptedEngine):
    """A scripted engine with `/metrics`. `narrow`: `/metrics/` writes only the metrics that the query names."""

    def __init__(self, page: bytes | Page, *, owner: str = "vllm", narrow: bool = True) -> None:
        super().__init__(None, streams([event("a"), usage_event(10, 1, 0), DONE]))
        self.page = page
        self.owner = owner
        self.narrow = narrow
        self.asked: list[str] = []
        self.keys: list[str | None] = []

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/metrics/", self._narrow)
        app.router.add_get("/version", self._version)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": model, "object": "model", "owned_by": self.owner} for model in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        self.keys.append(request.headers.get("Authorization"))
        return web.Response(body=self.page) if isinstance(self.page, bytes) else await self.page(request)

    async def _narrow(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        if not self.narrow or not isinstance(self.page, bytes):
            return web.Response(status=404)
        names = request.query.getall("name[]")
        lines = [line for line in self.page.decode().splitlines() if line.split("{")[0] in names]
        return web.Response(text="\n".join([*lines, ""]))


async def pods(gateway: Gateway) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = (await gateway.get("/v1/pods")).json["pods"]
    return shown


async def ask(gateway: Gateway, **sent: str) -> Answer:
    return await gateway.post({"model": "m", "prompt": "x" * 600, "stream": True}, **sent)


async def test_load_and_facts_of_a_vllm_are_shown_and_the_page_is_narrow_from_the_second_on() -> None:
    engine = MeteredEngine(vllm_page([Load(3.0, 1.0, 0.5)], phases=400))
    async with running(engine) as gateway:
        await eventually(lambda: gateway.app[FLEET].pods("m")[0].state.requests(asyncio.get_running_loop().time()) == 4)
        await eventually(lambda: gateway.app[FLEET].pods("m")[0].facts.version is not None)
        (shown,) = await pods(gateway)
        assert shown["load"]["in_flight"] == 4
        assert shown["load"]["kv_used"] == pytest.approx(0.5)
        about = shown["engine"]
        assert (about["engine"], about["version"], about["kv_capacity_tokens"]) == ("vllm", "0.32.0", 20_480)
        assert shown["metrics"]["problem"] is None or "take" in shown["metrics"]["problem"]
        assert shown["metrics"]["age_s"] is not None
        text = (await gateway.get("/metrics")).body.decode()
        assert "warmroute_gateway_engine_metrics_pause_seconds{engine=" in text
        assert 'warmroute_gateway_engine_metrics_reads_total{outcome="read"}' in text
        await eventually(lambda: len(engine.asked) >= 3)
        assert engine.asked[0] == "/metrics"
        assert all("name[]=" in asked or "name%5B%5D=" in asked for asked in engine.asked[1:])
        assert not any(key for key in engine.keys)
        engine.page = vllm_page([Load()])
        pod, clock = gateway.app[FLEET].pods("m")[0], asyncio.get_running_loop().time
        await eventually(lambda: pod.state.requests(clock()) == 0, deadline_s=60)


async def test_requests_for_a_rank_name_it_and_a_clients_own_wish_is_dropped() -> None:
    engine = MeteredEngine(vllm_page([Load(), Load()]))
    async with running(engine) as gateway:
        await ask(gateway, **{RANK: "7"})
        first = engine.received[-1].headers
        await gateway.wait_pods(2)
        name = engine.url.removeprefix("http://")
        seen = {(await ask(gateway, **{RANK: "7"})).pod for _ in range(4)}
        assert seen == {f"{name}/0", f"{name}/1"}
        sent = [request.headers.getall(RANK) for request in engine.received[-4:]]
        assert sorted(sent) == [["0"], ["0"], ["1"], ["1"]]
        assert first.getall(RANK, []) in ([], ["0"], ["1"]), "before its ranks are known the engine chooses"
        assert [(shown["pod"], shown["engine"]["rank"]) for shown in await pods(gateway)] == [
            (f"{name}/0", 0),
            (f"{name}/1", 1),
        ]
        explained = (await gateway.post({"model": "m", "prompt": "x"}, path="/v1/route/explain")).json
        assert [pod["pod"] for pod in explained["pods"]] == [f"{name}/0", f"{name}/1"]
        text = (await gateway.get("/metrics")).body.decode()
        assert f'warmroute_gateway_engine_in_flight{{engine="{name}/1"}} 0.0' in text
        ready = (await gateway.get("/ready")).json
        assert ready["pods"] == {"known": 1, "admitted": 1, "ejected": 0}, "an engine counts once, whatever its ranks"
        reset = (await gateway.post(b"", path="/reset_prefix_cache")).json
        assert len(reset["pods"]) == 1
        assert engine.resets == 1


async def test_ready_waits_for_the_ranks_so_no_request_goes_to_an_engine_as_one_target() -> None:
    page, may_answer = vllm_page([Load(), Load()]), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return web.Response(body=page)

    engine = MeteredEngine(slow)
    async with running(engine) as gateway:
        ready = await gateway.get("/ready")
        assert (ready.status, ready.json["missing"]) == (
            503,
            ["the engines have not been asked for their data-parallel ranks yet"],
        )
        may_answer.set()
        await eventually(lambda: knows_ranks(gateway))
        assert (await gateway.get("/ready")).status == 200
        assert len(gateway.app[FLEET].pods("m")) == 2
        await ask(gateway)
        assert engine.received[-1].headers[RANK] in ("0", "1")


@pytest.mark.parametrize("told", [True, False])
async def test_ready_does_not_wait_for_an_engine_that_tells_no_ranks(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """An engine that hangs delays readiness by a short deadline, or not at all if its ranks are known."""

    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(scrape, "DEADLINE_S", 30.0)
    monkeypatch.setattr(scrape, "FIRST_S", 25.0 if told else 0.3)
    if told:
        give_ranks(monkeypatch, 2)
    async with running(MeteredEngine(hangs)) as gateway:
        await eventually(lambda: knows_ranks(gateway), 20)
        assert (await gateway.get("/ready")).status == 200
        assert len(gateway.app[FLEET].pods("m")) == (2 if told else 1)


async def test_a_warm_rank_gets_the_next_request_of_its_prefix() -> None:
    engine = MeteredEngine(vllm_page([Load()] * 4))
    told, seen = streams([event("a"), usage_event(150, 1, None), DONE]), set()

    async def script(request: web.Request) -> web.StreamResponse:
        """Take time for a prefix that the rank has not seen: otherwise the gateway learns that caches gain nothing."""
        prompt = (request.headers[RANK], (await request.json())["prompt"])
        await asyncio.sleep(0 if prompt in seen else 0.1)
        seen.add(prompt)
        return await told(request)

    engine.script = script
    async with running(engine, policy="predicted_ttft") as gateway:
        await gateway.wait_pods(4)
        for prompt in range(6):
            body = {"model": "m", "prompt": f"{prompt} " * 2000, "stream": True}
            first = (await gateway.post(body)).pod
            assert {(await gateway.post(body)).pod for _ in range(3)} == {first}


async def test_a_reset_forgets_what_all_ranks_hold() -> None:
    engine = MeteredEngine(vllm_page([Load(), Load()]))
    async with running(engine, policy="predicted_ttft") as gateway:
        await gateway.wait_pods(2)
        body = {"model": "m", "prompt": "warm " * 2000, "stream": True}
        await gateway.post(body)
        again = await gateway.post(body)
        assert int(again.headers[headers.PREDICTED_CACHED]) > 0
        await gateway.post(b"", path="/reset_prefix_cache")
        assert (await gateway.post(body)).headers[headers.PREDICTED_CACHED] == "0"


async def test_ranks_can_be_given_if_metrics_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    give_ranks(monkeypatch, 3)
    engine = MeteredEngine(sglang_page([Load(9.0)]), owner="sglang")
    async with running(engine, engine_metrics_port=0) as gateway:
        assert gateway.app[SCRAPER] is None
        await gateway.wait_pods(3)
        await ask(gateway)
        assert engine.received[-1].headers[RANK] in ("0", "1", "2")
        assert engine.asked == []
        assert all(shown["metrics"] is None for shown in await pods(gateway))


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    line = b'vllm:num_requests_running{engine="0"} 99999\n' * 1000
    while True:
        await response.write(line)


async def hanging(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody gave the request up")


async def protected(request: web.Request) -> web.StreamResponse:
    return web.Response(status=401)


async def huge(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x" * (MAX_PAGE_BYTES + 1))


async def absurd(request: web.Request) -> web.StreamResponse:
    return web.Response(body=vllm_page([Load("1e300", "-5", "NaN")]))


async def strange(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"llamacpp:requests_processing 7\n")


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("page", "outcomes", "problem"),
    [
        (endless, {"odd", "late"}, ""),
        (hanging, {"late"}, "more than 1 s"),
        (protected, {"protected"}, "--engine-api-key-file"),
        (huge, {"odd", "late"}, ""),
        (absurd, {"read"}, ""),
        (strange, {"none"}, "no requests of vLLM or SGLang"),
        (cut, {"failed"}, "ServerDisconnected"),
    ],
)
async def test_a_page_that_means_harm_changes_no_load_and_no_request(
    page: Page, outcomes: set[str], problem: str
) -> None:
    engine = MeteredEngine(b"")
    engine.page = page
    async with running(engine) as gateway:
        scraper = gateway.app[SCRAPER]
        assert scraper is not None
        await eventually(lambda: sum(scraper.counts.values()) > 0)
        assert {outcome for outcome, count in scraper.counts.items() if count} <= outcomes
        (shown,) = await pods(gateway)
        assert problem in (shown["metrics"]["problem"] or "")
        assert shown["metrics"]["every_s"] >= (1 if outcomes == {"read"} else 2)
        assert shown["load"]["in_flight"] == 0
        assert (await ask(gateway)).status == 200


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key").write_text("sesame\n")
    return str(tmp_path / "key")


async def test_metrics_may_have_a_port_of_their_own() -> None:
    engine, exporter = MeteredEngine(vllm_page([Load(1.0)])), MeteredEngine(vllm_page([Load()]))
    await exporter.start()
    try:
        port = int(exporter.url.rpartition(":")[2])
        async with running(engine, engine_metrics_port=port) as gateway:
            await eventually(lambda: bool(exporter.asked))
            assert engine.asked == []
            assert len(await pods(gateway)) == 1
    finally:
        await exporter.stop()


async def test_the_engines_key_is_shown_to_its_metrics(key_file: str) -> None:
    engine = MeteredEngine(vllm_page([Load()]))
    async with running(engine, engine_api_key_file=key_file):
        await eventually(lambda: bool(engine.keys))
        assert engine.keys[0] == "Bearer sesame"
