"""More comes than the engines can do: what is answered is answered in time, the rest is refused at once."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.router.rig.helpers import Gateway, ScriptedEngine, event, running, streams

GOOD = [event("fine"), b"data: [DONE]\n\n"]
SERVICE_S = 0.5
"""Seconds that the engine takes for a request, one after the other."""
LASTS_S = 40.0
SETTLES_S = 12.0
"""Requests of the first seconds do not count: a queue stands only after some time."""
GOAL_S = 1.0 + 4 * 2 * SERVICE_S
"""No more than the learnt goal: an estimate of an engine's time that is twice too long is still good."""


def one_at_a_time() -> ScriptedEngine:
    turn = asyncio.Lock()

    async def script(request: web.Request) -> web.StreamResponse:
        async with turn:
            await asyncio.sleep(SERVICE_S)
            return await streams(GOOD)(request)

    return ScriptedEngine("pod-0", script)


async def offered(gateway: Gateway, per_s: float, **sent: str) -> list[tuple[float, int, float]]:
    """Send requests at a steady rate; return when each was sent, its status, and the seconds that it took."""
    clock = asyncio.get_running_loop().time
    began_s = clock()

    async def one(number: int) -> tuple[float, int, float]:
        at_s = number / per_s
        await asyncio.sleep(began_s + at_s - clock())
        sent_s = clock()
        body = {"model": "m", "prompt": f"number {number}", "stream": True}
        answer = await gateway.post(body, **sent)
        return at_s, answer.status, clock() - sent_s

    return await asyncio.gather(*(one(number) for number in range(round(LASTS_S * per_s))))


def goodput(seen: list[tuple[float, int, float]]) -> float:
    """Return what was answered within the goal, relative to what the engine can do."""
    good = sum(at_s >= SETTLES_S and status == 200 and took_s <= GOAL_S for at_s, status, took_s in seen)
    return good * SERVICE_S / (LASTS_S - SETTLES_S)


@pytest.mark.parametrize("load", [2.0, 4.0])
async def test_as_much_is_in_time_as_the_engine_can_do_however_much_comes(load: float) -> None:
    async with running(one_at_a_time(), max_pod_requests=1) as gateway:
        seen = await offered(gateway, load / SERVICE_S)
        assert {status for _, status, _ in seen} == {200, 429}
        assert goodput(seen) >= 0.9
        assert 'queue_refused_total{reason="standing"}' in (await gateway.get("/metrics")).body.decode()


async def test_below_the_capacity_nobody_is_refused() -> None:
    async with running(one_at_a_time(), max_pod_requests=1) as gateway:
        seen = await offered(gateway, 0.9 / SERVICE_S)
        assert {status for _, status, _ in seen} == {200}


async def test_with_a_goal_of_0_everybody_is_kept() -> None:
    async with running(one_at_a_time(), max_pod_requests=1, ttft_goals=["0"], queue_timeout_s=300.0) as gateway:
        seen = await offered(gateway, 2.0 / SERVICE_S)
        assert {status for _, status, _ in seen} == {200}


async def test_a_models_goal_is_kept() -> None:
    async with running(one_at_a_time(), max_pod_requests=1, ttft_goals=["60", "m=1.5"]) as gateway:
        seen = await offered(gateway, 3.0 / SERVICE_S)
        late = [took_s for at_s, status, took_s in seen if at_s >= SETTLES_S and status == 200 and took_s > 1.6]
        assert not late
        assert goodput(seen) >= 0.9
