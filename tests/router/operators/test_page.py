"""The live page and its stream over real sockets; `top`; and the page in a real browser if there is one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from blockbuster import BlockBuster

from engine.contract.load import LoadReport, StepCost, pack_load, unpack_load
from router.operators import live_feed as feed
from router.operators.live_feed import MOST_VIEWERS
from router.operators.pages import PAGE, content_policy
from router.operators.snapshot import MOST_PODS
from router.startup.parts import FLEET
from router.views.types import PodId
from tests.browser import Browser
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, eventually, running, streams, usage_event

PROMPT = {"model": "m", "prompt": "x" * 2_000, "stream": True}
GOOD = streams([usage_event(500, 3, 384), b"data: [DONE]\n\n"])
BROKEN = answers(500)


@contextlib.asynccontextmanager
async def watching(gateway: Gateway) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Yield a viewer's frames, one after the other."""

    async def frames(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield orjson.loads(line[6:])

    timeout = aiohttp.ClientTimeout(total=60)
    async with gateway.session.get(f"{gateway.admin_url}/ui/events", timeout=timeout) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield frames(answer)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.05)
    monkeypatch.setattr(feed, "PREFIXES_EVERY", 1)


async def test_a_viewer_sees_pods_decisions_with_scores_and_hot_prefixes() -> None:
    async with running(ScriptedEngine("a", GOOD), ScriptedEngine("b", GOOD), policy="predicted_ttft") as gateway:
        async with watching(gateway) as frames:
            first = await anext(frames)
            assert [row["pod"] for row in first["pods"]["rows"]] == ["a", "b"]
            assert first["about"]["policy"] == "predicted_ttft"
            assert (first["decisions"], first["prefixes"]) == ([], [])
            for _ in range(4):
                assert (await gateway.post(PROMPT)).status == 200
            decisions: list[dict[str, Any]] = []
            async for frame in frames:
                decisions = frame["decisions"] if "history" in frame else decisions + frame["decisions"]
                frame.setdefault("point", {name: values[-1] for name, values in frame.get("history", {}).items()})
                if len(decisions) == 4 and frame["prefixes"] and frame["point"]["hit_rate"]:
                    break
        assert {decided["status"] for decided in decisions} == {200}
        scored = decisions[0]
        assert {score["pod_id"] for score in scored["scores"]} == {"a", "b"}
        assert scored["pod"] == min(scored["scores"], key=lambda score: score["score"])["pod_id"]
        assert scored["cached_tokens"] == 384
        assert scored["expected_ttft_s"] > 0
        (hot,) = frame["prefixes"]
        assert hot["share"] == 1.0
        assert set(hot["holders"]) == {decided["pod"] for decided in decisions}
        assert frame["point"]["hit_rate"] == pytest.approx(384 / 500)
        assert b"xxxx" not in orjson.dumps(frame)  # no text of a prompt


async def test_without_viewers_nothing_is_kept_of_requests() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        async with watching(gateway) as frames:
            await anext(frames)
            await gateway.post(PROMPT)
        await gateway.post(PROMPT)

        async def is_forgotten() -> bool:
            state = (await whole(gateway))["decisions"]
            return not state

        async with asyncio.timeout(30):
            while not await is_forgotten():  # noqa: ASYNC110  # until the gateway notices that the viewer has left
                await asyncio.sleep(0.01)


async def whole(gateway: Gateway) -> dict[str, Any]:
    async with gateway.session.get(f"{gateway.admin_url}/ui/state") as answer:
        state: dict[str, Any] = await answer.json()
        return state


async def test_a_pod_in_trouble_is_shown_as_such() -> None:
    async with running(ScriptedEngine("a", BROKEN), ScriptedEngine("b", GOOD), eject_after=2) as gateway:
        for _ in range(8):
            await gateway.post(PROMPT)
        rows = {row["pod"]: row["state"] for row in (await whole(gateway))["pods"]["rows"]}
        assert rows == {"a": "ejected", "b": "serving"}


@pytest.mark.parametrize("token_s", [1e-30, 5e-324])
async def test_a_pod_that_reports_an_absurd_speed_does_not_end_the_page(token_s: float) -> None:
    """The time for a token has no least value in a report, and its inverse is a number that JSON cannot hold."""
    async with running(ScriptedEngine("a", GOOD), ScriptedEngine("b", GOOD)) as gateway:
        fleet = gateway.app[FLEET]
        async with watching(gateway) as frames:
            for pod, seconds in (("a", token_s), ("b", 0.001)):
                load = unpack_load(pack_load(LoadReport(cost=StepCost(token_s=seconds))))
                fleet.report(PodId(pod), load)
            shown = {row["pod"]: row["tokens_per_s"] for row in (await whole(gateway))["pods"]["rows"]}
            assert shown == {"a": None, "b": 1000}
            async with asyncio.timeout(30):
                for _ in range(3):
                    await anext(frames)


async def test_pods_in_trouble_and_the_busiest_of_many_pods_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.operators.snapshot.MOST_PODS", 1)
    assert MOST_PODS > 1
    async with running(ScriptedEngine("a", GOOD), ScriptedEngine("b", BROKEN), eject_after=2) as gateway:
        for _ in range(8):
            await gateway.post(PROMPT)
        pods = (await whole(gateway))["pods"]
        assert [row["pod"] for row in pods["rows"]] == ["b"]
        assert pods["states"] == {"serving": 1, "ejected": 1}


async def test_viewers_are_bounded_and_one_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_VIEWERS", 2)
    assert MOST_VIEWERS > 2
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        async with watching(gateway) as one, watching(gateway) as two:
            await anext(one)
            await anext(two)
            async with gateway.session.get(f"{gateway.admin_url}/ui/events") as third:
                error = (await third.json())["error"]
                assert (third.status, error["code"]) == (503, "viewers")

        async def is_free() -> bool:
            async with gateway.session.get(f"{gateway.admin_url}/ui/events") as answer:
                return answer.status == 200

        async with asyncio.timeout(30):
            while not await is_free():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_gateway_that_stops_does_not_wait_for_viewers() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        answer = await gateway.session.get(f"{gateway.admin_url}/ui/events")
        await answer.content.readline()
    answer.close()


async def test_the_page_loads_nothing_and_clients_do_not_get_it() -> None:
    page = PAGE
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}  # this name is not loaded
    assert "innerHTML" not in page
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        async with gateway.session.get(f"{gateway.admin_url}/ui") as answer:
            assert await answer.text() == page
            assert answer.headers["Content-Security-Policy"] == content_policy(page)
        for path in ("/ui", "/ui/events", "/ui/state"):
            async with gateway.session.get(gateway.url + path) as answer:
                assert answer.status == 404


# -- top ------------------------------------------------------------------------------------------------------------


async def top(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "router", "top", *arguments]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
    return ran.returncode, ran.stdout + ran.stderr


async def test_top_prints_the_fleet(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()
    async with running(ScriptedEngine("pod-one", GOOD), ScriptedEngine("pod-two", GOOD)) as gateway:
        await gateway.post(PROMPT)
        await eventually(lambda: gateway.in_flight == 0)
        status, text = await top("--once", "--admin-url", gateway.admin_url)
        assert status == 0, text
        assert "pod-one" in text
        assert "2 of 2 pods serve" in text
        status, text = await top("--once", "--admin-url", gateway.url)
        assert status == 1
        assert "--admin-port" in text
        was_there = gateway.admin_url
    status, text = await top("--admin-url", was_there)
    assert status == 1
    assert "refused" in text


# -- a real browser -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium, a Debian package")
async def test_a_browser_draws_it_at_every_width_in_light_and_dark(
    tmp_path: Path, no_blocking_calls: BlockBuster, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_blocking_calls.deactivate()
    hostile = "<script>document.title='taken'"
    async with (
        running(ScriptedEngine("a", GOOD), ScriptedEngine(hostile, GOOD), policy="predicted_ttft") as gateway,
        Browser.started(tmp_path) as browser,
    ):
        await browser.open(f"{gateway.admin_url}/ui")
        await browser.until("document.getElementById('state').textContent === 'live'")
        for _ in range(6):
            assert (await gateway.post(PROMPT)).status == 200
        await browser.until("document.querySelectorAll('#decision-rows button').length > 0")
        await browser.until("document.querySelectorAll('.prefix').length > 0")
        await browser.run("document.querySelector('#decision-rows button').click()")
        await browser.until("document.querySelectorAll('.scores tr.chosen').length === 1")
        assert await browser.run("document.getElementById('pod-rows').children.length") == 2
        assert await browser.run("document.title") == "warmroute"
        assert hostile in await browser.run("document.getElementById('pod-rows').textContent")
        looks = set()
        for scheme in ("light", "dark"):
            for width in (400, 1400):
                await browser.looks(width, scheme)
                assert await browser.run("document.documentElement.scrollWidth") <= width
                looks.add(await browser.run("getComputedStyle(document.body).backgroundColor"))
        assert len(looks) == 2
        assert browser.problems == []
