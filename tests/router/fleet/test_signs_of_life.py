"""Probes of a large fleet, in virtual time: pods with other signs of life are probed rarely, until the signs stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Iterator

import pytest

from router.fleet import fleet
from router.fleet.discovery import EngineAddress
from router.fleet.fleet import JITTER
from router.fleet.probe import ProbeFailed
from router.views.types import PodId
from tests.router.fleet.test_fleet import World, identity

pytestmark = pytest.mark.looptime
INTERVAL_S = 1.0
SMALL = 4
LARGE = 10 * SMALL
EJECT_AFTER = 3
HEARTBEAT_S = 0.5


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a smaller fleet, because thousands of tasks are slow in virtual time too."""
    monkeypatch.setattr(fleet, "SMALL_FLEET", SMALL)


def world_of(pods: int) -> World:
    urls = [f"http://p{i}" for i in range(pods)]
    world = World(*urls)
    world.probe.pods = {url: identity(url.removeprefix("http://")) for url in urls}
    return world


@contextlib.contextmanager
def publishing(world: World, *silent: str, epoch: int = 1) -> Iterator[None]:
    """Let every pod except the `silent` ones publish twice a second."""

    async def heartbeats() -> None:
        while True:
            for url in world.probe.pods:
                if url not in silent:
                    world.fleet.heard(PodId(url.removeprefix("http://")), epoch)
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(heartbeats())
    try:
        yield
    finally:
        task.cancel()


def probes_in(world: World, url: str, since_s: float) -> int:
    return sum(when_s >= since_s for when_s in world.probe.seen[url])


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_pods_that_publish_are_probed_together_as_often_as_a_small_fleet() -> None:
    world = world_of(LARGE)
    async with world.running():
        with publishing(world, "http://p7"):
            since_s, wall_s = now_s(), 25.0
            await asyncio.sleep(wall_s)
            spared = sum(probes_in(world, url, since_s) for url in world.probe.pods if url != "http://p7")
            assert spared <= 1.3 * wall_s * SMALL / INTERVAL_S
            for url in world.probe.pods:
                assert probes_in(world, url, since_s) >= math.floor(
                    wall_s / (LARGE / SMALL * INTERVAL_S * (1 + JITTER))
                )
            assert probes_in(world, "http://p7", since_s) >= wall_s / (INTERVAL_S * (1 + JITTER)) - 1
        assert len(world.ids()) == LARGE


async def test_in_a_small_fleet_nobody_is_spared() -> None:
    world = world_of(SMALL)
    async with world.running():
        with publishing(world):
            since_s = now_s()
            await asyncio.sleep(20)
            for url in world.probe.pods:
                assert probes_in(world, url, since_s) >= 20 / (INTERVAL_S * (1 + JITTER)) - 1


async def test_a_pod_that_dies_is_gone_as_soon_as_in_a_small_fleet() -> None:
    world = world_of(LARGE)
    dead = "http://p3"
    async with world.running():
        with publishing(world):
            await asyncio.sleep(5)
        with publishing(world, dead):
            world.probe.pods[dead] = ProbeFailed("connection refused")
            died_s = now_s()
            while "p3" in world.ids():
                await asyncio.sleep(0.05)
                assert now_s() - died_s <= EJECT_AFTER * INTERVAL_S * (1 + JITTER) + 0.1
        assert len(world.ids()) == LARGE - 1


async def test_another_life_is_noticed_as_soon_as_in_a_small_fleet() -> None:
    """Messages of another epoch are not a sign that the known engine is alive."""
    world = world_of(LARGE)
    async with world.running():
        with publishing(world):
            await asyncio.sleep(5)
        world.probe.pods["http://p3"] = identity("p3", 2)
        with publishing(world, "http://p3"):
            for _ in range(int(INTERVAL_S * (1 + JITTER) / 0.1) + 1):
                world.fleet.heard(PodId("p3"), 2)
                await asyncio.sleep(0.1)
            assert {"p3"} in [change.ended for change in world.changes]


async def test_a_pod_that_could_not_be_reached_is_probed_at_once_though_it_publishes() -> None:
    world = world_of(LARGE)
    async with world.running():
        with publishing(world):
            await asyncio.sleep(5)
            (pod,) = (pod for pod in world.fleet.pods("m") if pod.pod_id == "p3")
            world.probe.pods["http://p3"] = ProbeFailed("connection refused")
            world.fleet.failed(pod, "connection refused")
            since_s = now_s()
            await asyncio.sleep(0.01)
            assert probes_in(world, "http://p3", since_s) == 1
            await asyncio.sleep(EJECT_AFTER * INTERVAL_S * (1 + JITTER))
            assert "p3" not in world.ids(), "further probes follow a failed one, whatever the pod publishes"


async def test_answers_are_signs_of_life_too() -> None:
    world = world_of(LARGE)
    async with world.running():
        since_s = now_s()
        for _ in range(40):
            for pod in world.fleet.pods("m"):
                if pod.pod_id != "p3":
                    pod.faults.began(now_s())
            await asyncio.sleep(HEARTBEAT_S)
        assert probes_in(world, "http://p4", since_s) <= 3
        assert probes_in(world, "http://p3", since_s) >= 20 / (INTERVAL_S * (1 + JITTER)) - 1


@pytest.mark.timeout(20)  # if the fleet set its timer again and again, this test would never end
async def test_a_timer_that_is_early_by_less_than_a_tick_of_the_clock_ends_the_wait() -> None:
    class Odd(random.Random):
        """Draws pauses that end 0.4 ns after a tick of the loop's clock. The loop runs timers up to 1 ns early."""

        def uniform(self, a: float, b: float) -> float:
            return 1.0000000004

    world = world_of(LARGE)
    world.fleet = fleet.Fleet(world.discovery, world.probe, interval_s=1.0, eject_after=EJECT_AFTER, rng=Odd())
    async with world.running():
        await asyncio.sleep(0.5)
        world.fleet.heard(PodId("p0"), 1)
        await asyncio.sleep(2.0)
    assert world.probe.seen["http://p0"] == pytest.approx([0.0, 1.5, 2.5], abs=0.01)


async def test_a_pod_that_becomes_ready_is_probed_at_once_though_it_publishes() -> None:
    world = world_of(LARGE)
    async with world.running():
        with publishing(world):
            addresses = [EngineAddress(url, is_ready=url != "http://p3") for url in world.probe.pods]
            world.discovery.put(*addresses)
            await asyncio.sleep(3.3)
            assert "p3" not in world.ids()
            since_s = now_s()
            world.discovery.put(*map(EngineAddress, world.probe.pods))
            await asyncio.sleep(0.01)
            assert probes_in(world, "http://p3", since_s) >= 1
            assert "p3" in world.ids()
