"""Disturbed pods lose no request that had not begun to stream. Orderly changes do not cut streams either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest

from tests.cluster.cluster import RELEASE, PodTimes, do, pods, watching
from tests.cluster.conftest import ApiServer
from tests.cluster.traffic import Journal, Outcome, traffic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

GATEWAY, ENGINE, REDIS = f"{RELEASE}-gateway", f"{RELEASE}-engine-sim", f"{RELEASE}-redis"
GATEWAYS = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=gateway"
ENGINES = f"app.kubernetes.io/instance={RELEASE},warmroute.io/model=sim"
REPLICAS = 3
FIRST_TRAFFIC_S = 3.0
LAST_TRAFFIC_S = 1.0


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110  # what happens in a cluster sets no event here
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"{what} did not come within {deadline_s:g} s")


async def flowing(journal: Journal, answers: int = 24) -> None:
    """Wait until `answers` more requests have ended."""
    wanted = len(journal.records) + answers
    await until(lambda: len(journal.records) >= wanted, f"{answers} answers")


async def rolled_out(workload: str) -> None:
    await do("rollout", "status", workload, "--timeout=180s", timeout_s=190)


def check(journal: Journal, times: PodTimes | None = None, *, may_cut: bool = False) -> None:
    """Check that nothing is lost, that only allowed streams are cut, and that pods serve from Ready until their end."""
    outcomes = journal.outcomes()
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    delays = {pod: journal.first_byte_from(pod) for pod in (times.new if times else ())}
    late = {pod: first - times.ready[pod] for pod, first in delays.items() if times and first is not None}
    print(f"\n{summary}; seconds from Ready to the first answer: {sorted(round(s, 2) for s in late.values())}")
    assert not journal.of(Outcome.LOST)
    assert may_cut or not journal.of(Outcome.CUT)
    assert outcomes[Outcome.WHOLE] > 20
    if times is None:
        return
    unused = times.new - journal.pods()
    assert not unused, f"{unused} became Ready and got no request"
    assert all(delay_s < FIRST_TRAFFIC_S for delay_s in late.values()), late
    for pod, dying_s in times.dying.items():
        after = [record.started_s - dying_s for record in journal.since(dying_s + LAST_TRAFFIC_S) if record.pod == pod]
        assert not after, f"{pod} got requests {after} s after it was told to end"


async def test_scaling_up_and_down(url: str) -> None:
    async with watching(ENGINES) as times, traffic(url) as journal:
        await flowing(journal)
        await do("scale", f"deployment/{ENGINE}", f"--replicas={REPLICAS + 2}")
        await rolled_out(f"deployment/{ENGINE}")
        await until(lambda: len(times.new) == 2 and times.new <= journal.pods(), "traffic on both new pods", 30)
        await do("scale", f"deployment/{ENGINE}", f"--replicas={REPLICAS}")
        await until(lambda: len(times.gone) == 2, "the end of two pods", 60)
        await flowing(journal)
    assert len(times.dying) == 2
    check(journal, times)


async def test_deleting_an_engine_under_load(url: str) -> None:
    async with watching(ENGINES) as times, traffic(url) as journal:
        await flowing(journal)
        victim = (await asyncio.to_thread(pods, ENGINES))[0]
        await do("delete", "pod", victim, "--wait=false")
        await until(lambda: victim in times.gone, "the end of the pod", 60)
        await until(lambda: bool(times.new) and times.new <= journal.pods(), "traffic on its successor")
    check(journal, times)


async def test_an_engine_that_crashes_under_load(url: str) -> None:
    """Answers that had begun end in an error event. Other requests go elsewhere, and the engine serves again later."""
    async with traffic(url) as journal:
        await flowing(journal)
        victim = (await asyncio.to_thread(pods, ENGINES))[0]
        await do("exec", victim, "--container", "engine", "--", "sh", "-c", "kill -9 -1")
        crashed_s = time.time()
        await until(
            lambda: any(r.pod == victim and r.outcome is Outcome.WHOLE for r in journal.since(crashed_s + 1)),
            "an answer of the restarted container",
        )
    assert all("error" in cut for cut in journal.of(Outcome.CUT)), journal.of(Outcome.CUT)
    check(journal, may_cut=True)


async def test_rolling_the_gateways(url: str) -> None:
    async with watching(GATEWAYS) as times, traffic(url) as journal:
        await flowing(journal)
        await do("rollout", "restart", f"deployment/{GATEWAY}")
        await rolled_out(f"deployment/{GATEWAY}")
        await until(lambda: len(times.gone) == 2, "the end of both old gateways", 150)
        await flowing(journal)
    check(journal)


async def test_rolling_the_engines(url: str) -> None:
    async with watching(ENGINES) as times, traffic(url) as journal:
        await flowing(journal)
        await do("rollout", "restart", f"deployment/{ENGINE}")
        await rolled_out(f"deployment/{ENGINE}")
        await until(lambda: len(times.gone) == REPLICAS, "the end of the old engines", 150)
        await until(lambda: times.new <= journal.pods(), "traffic on every new engine", 30)
    assert len(times.new) == REPLICAS
    check(journal, times)


async def test_restarting_redis(url: str) -> None:
    async with traffic(url) as journal:
        await flowing(journal)
        await do("delete", "pod", f"{REDIS}-0")
        await flowing(journal)
        await rolled_out(f"statefulset/{REDIS}")
        await flowing(journal)
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:  # asks either gateway; other tests check each one's registry
                async with session.get(f"{url}/ready") as answer:
                    registry = (await answer.json())["registry"]
                if registry["connected"] and registry["pods_synced"] == REPLICAS + 1:
                    break
                await asyncio.sleep(0.2)
    check(journal)


async def test_restarting_the_api_server(url: str, api_server: ApiServer) -> None:
    async with traffic(url) as journal:
        await flowing(journal)
        await asyncio.to_thread(api_server.stop)
        await flowing(journal, 60)
        await asyncio.to_thread(api_server.start)
        await flowing(journal)
        async with watching(ENGINES) as times:  # the gateways follow the server again
            victim = (await asyncio.to_thread(pods, ENGINES))[0]
            await do("delete", "pod", victim, "--wait=false")
            await until(lambda: victim in times.gone, "the end of the pod", 90)
            await until(lambda: bool(times.new) and times.new <= journal.pods(), "traffic on its successor", 90)
    check(journal)
