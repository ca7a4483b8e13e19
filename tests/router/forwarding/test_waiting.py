"""Requests that wait at the gateway: for an engine with room, in order, within bounds; and for a model that sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from engine.contract import headers
from router.forwarding.exchange import Arrival, Exchange
from router.reading.inbound import Inbound
from router.startup.parts import ROOM
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    event,
    eventually,
    running,
    streams,
)

PATIENT_S = 120.0
"""Long enough that no request times out on a slow machine."""
GOOD = [event("fine"), b"data: [DONE]\n\n"]


def ask(text: str = "x", **fields: object) -> dict[str, object]:
    return {"model": "m", "prompt": text, "stream": True, **fields}


class Gate:
    """A script that answers requests one by one, when a test tells it to."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: the engine answers 429 to requests beyond this many at a time."""
        self.most = most
        self.refused = 0
        self.inside = 0
        self.turns = asyncio.Semaphore(0)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.most is not None and self.inside >= self.most:
            self.refused += 1
            return web.Response(status=429, headers={"Retry-After": "1"}, body=b"{}")
        self.inside += 1
        try:
            await self.turns.acquire()
            return await streams(GOOD)(request)
        finally:
            self.inside -= 1


def waiting(gateway: Gateway) -> int:
    return gateway.app[ROOM].waiting().get("m", 0)


async def queued(gateway: Gateway, count: int, tasks: list[asyncio.Task[Answer]], **sent: str) -> None:
    """Send one more request, which waits as the `count`th."""
    tasks.append(asyncio.create_task(gateway.post(ask(f"number {len(tasks)}"), **sent)))
    await eventually(lambda: waiting(gateway) == count)


def prompts(engine: ScriptedEngine) -> list[int]:
    """The numbers of `queued`'s prompts, in the order in which the engine got them."""
    return [int(r.body.split(b"number ")[1].split(b'"')[0]) for r in engine.received if b"number " in r.body]


async def test_what_an_engine_may_not_get_waits_and_goes_by_priority() -> None:
    gate = Gate()
    engine = ScriptedEngine("pod-0", gate)
    async with running(engine, max_pod_requests=1, queue_timeout_s=PATIENT_S) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask()))]
        await eventually(lambda: gate.inside == 1)
        for count, priority in enumerate(("0", "-3", "0", "-1"), start=1):
            await queued(gateway, count, tasks, **{headers.PRIORITY: priority})
        text = (await gateway.get("/metrics")).body.decode()
        assert 'warmroute_gateway_queue_requests{model="m"} 4.0' in text
        for _ in tasks:
            gate.turns.release()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 5
        assert gate.refused == 0
        order = prompts(engine)
        # The first is number 1. After it, a request of low priority may go ahead, because low priorities have a share.
        assert order[0] == 1
        assert order.index(1) < order.index(3)
        assert order.index(4) < order.index(2)
        text = (await gateway.get("/metrics")).body.decode()
        assert "warmroute_gateway_queue_seconds_count 4.0" in text
        assert 'warmroute_gateway_tenant_queue_seconds_count{tenant="default"} 4.0' in text
        assert 'warmroute_gateway_queue_requests{model="m"} 0.0' in text


async def test_a_session_with_many_requests_does_not_hold_back_another_one_of_its_tenant() -> None:
    gate = Gate()
    engine = ScriptedEngine("pod-0", gate)
    async with running(engine, max_pod_requests=1, queue_timeout_s=PATIENT_S) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask()))]
        await eventually(lambda: gate.inside == 1)
        sessions = ["greedy"] * 6 + ["polite", "other"]
        for count, session in enumerate(sessions, start=1):
            await queued(gateway, count, tasks, **{headers.SESSION: session})
        for _ in tasks:
            gate.turns.release()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * len(tasks)
        order = prompts(engine)
        assert order[:3] == [1, 7, 8]
        assert order[3:] == [2, 3, 4, 5, 6]


async def test_a_client_that_leaves_has_left_the_queue() -> None:
    gate = Gate()
    engine = ScriptedEngine("pod-0", gate)
    async with running(engine, max_pod_requests=1, queue_timeout_s=PATIENT_S) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask()))]
        await eventually(lambda: gate.inside == 1)
        await queued(gateway, 1, tasks)
        await queued(gateway, 2, tasks)
        tasks[1].cancel()
        await eventually(lambda: waiting(gateway) == 1)
        gate.turns.release()
        gate.turns.release()
        assert (await tasks[2]).status == 200
        assert prompts(engine) == [2]


@pytest.mark.realtime  # one turn of the loop takes no virtual time
async def test_a_client_that_leaves_in_its_turn_keeps_nobody_else_waiting() -> None:
    gate, faults = Gate(), list[dict[str, Any]]()
    loop = asyncio.get_running_loop()
    async with running(ScriptedEngine("pod-0", gate), max_pod_requests=1, queue_timeout_s=PATIENT_S) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask()))]
        await eventually(lambda: gate.inside == 1)
        await queued(gateway, 1, tasks)
        for _ in range(2):
            gate.turns.release()
        await asyncio.gather(*tasks)
        loop.set_exception_handler(lambda _, fault: faults.append(fault))
        # A request has just waited, so the next ones enter the queue, which they leave at once: the engine is idle.
        room, now_s = gateway.app[ROOM], loop.time()
        inbound = Inbound("/v1/completions", "m", True, "round_robin", (), 1, 1, 1.0, 1, teaches_tokens=False, body=b"")
        exchanges = [Exchange(Arrival(name, now_s, now_s + PATIENT_S)) for name in ("leaves", "stays")]
        leaves, stays = [asyncio.create_task(room.place(inbound, exchange)) for exchange in exchanges]
        loop.call_soon(leaves.cancel)
        async with asyncio.timeout(PATIENT_S / 2):
            assert await stays == frozenset()
        assert leaves.cancelled()
        assert exchanges[0].queued_s > 0
        assert waiting(gateway) == 0
    assert not faults


async def test_nobody_waits_longer_than_the_setting_says() -> None:
    gate = Gate()
    async with running(ScriptedEngine("pod-0", gate), max_pod_requests=1, queue_timeout_s=0.2) as gateway:
        first = asyncio.create_task(gateway.post(ask()))
        await eventually(lambda: gate.inside == 1)
        answer = await gateway.post(ask())
        assert answer.status == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json["error"]["code"] == "overloaded"
        gate.turns.release()
        assert (await first).status == 200
        assert 'queue_refused_total{reason="late"} 1.0' in (await gateway.get("/metrics")).body.decode()


async def test_a_full_queue_drops_the_lowest_priority_first() -> None:
    gate = Gate()
    async with running(
        ScriptedEngine("pod-0", gate), max_pod_requests=1, queue_requests=1, queue_timeout_s=PATIENT_S
    ) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask()))]
        await eventually(lambda: gate.inside == 1)
        await queued(gateway, 1, tasks, **{headers.PRIORITY: "-1"})
        tasks.append(asyncio.create_task(gateway.post(ask())))
        assert (await tasks[1]).status == 429
        assert (await gateway.post(ask())).status == 429
        for _ in range(2):
            gate.turns.release()
        assert [(await task).status for task in (tasks[0], tasks[2])] == [200, 200]
        text = (await gateway.get("/metrics")).body.decode()
        assert 'queue_refused_total{reason="shed"} 1.0' in text
        assert 'queue_refused_total{reason="full"} 1.0' in text


async def test_how_much_an_engine_takes_is_learnt_from_its_refusals() -> None:
    gate = Gate(most=2)
    async with running(ScriptedEngine("pod-0", gate), queue_timeout_s=PATIENT_S) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask(f"number {number}"))) for number in range(12)]
        await eventually(lambda: gate.inside == 2 and gate.refused > 0 and waiting(gateway) > 0)
        for _ in tasks:
            gate.turns.release()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 12
        assert gate.refused <= 12  # all were sent before the first refusal; after it hardly any was refused


async def test_an_engine_that_refuses_without_being_full_is_believed() -> None:
    async with running(ScriptedEngine("pod-0", answers(429))) as gateway:
        answer = await gateway.post(ask())
        assert answer.status == 429
        assert answer.pod == "pod-0"


async def test_a_first_token_that_cannot_come_in_time_is_refused_at_once() -> None:
    engine = ScriptedEngine("pod-0", streams(GOOD))
    async with running(engine) as gateway:
        assert (await gateway.post(ask(), **{headers.TTFT_SLO: "60000"})).status == 200
        answer = await gateway.post(ask("x" * 400_000), **{headers.TTFT_SLO: "1"})
        assert answer.status == 429
        assert answer.json["error"]["param"] == headers.TTFT_SLO
        assert answer.json["error"]["code"] == "slo"
        assert int(answer.headers["Retry-After"]) >= 1
        assert len(engine.received) == 1
        assert headers.TTFT_SLO not in engine.received[0].headers
        assert 'queue_refused_total{reason="slo"} 1.0' in (await gateway.get("/metrics")).body.decode()


@pytest.mark.parametrize("value", ["", "high", "1.5", "1", "-10", "99999999999999999999"])
async def test_a_priority_that_is_invalid_or_not_allowed_is_refused_by_name(value: str) -> None:
    async with running(ScriptedEngine("pod-0", streams(GOOD))) as gateway:
        answer = await gateway.post(ask(), **{headers.PRIORITY: value})
        assert answer.status == 400
        assert answer.json["error"]["param"] == headers.PRIORITY
        assert "from -9 to 0" in answer.json["error"]["message"]


@pytest.mark.parametrize("value", ["", "0", "-5", "soon", "2.5", "10000000"])
async def test_an_invalid_time_is_refused_by_name(value: str) -> None:
    async with running(ScriptedEngine("pod-0", streams(GOOD))) as gateway:
        answer = await gateway.post(ask(), **{headers.TTFT_SLO: value})
        assert answer.status == 400
        assert answer.json["error"]["param"] == headers.TTFT_SLO


@pytest.mark.parametrize(
    ("kind", "asked", "sent"),
    [
        ("none", {"priority": 7}, b'"priority":7'),
        ("vllm", {}, b'"priority":3'),
        ("vllm", {"priority": -99}, b'"priority":3'),
        ("sglang", {"priority": 99}, b'"priority":-3'),
    ],
)
async def test_engines_are_told_the_priority_by_their_own_sign(kind: str, asked: Any, sent: bytes) -> None:
    engine = ScriptedEngine("pod-0", streams(GOOD))
    async with running(engine, engine_priority=kind) as gateway:
        assert (await gateway.post(ask(**asked), **{headers.PRIORITY: "-3"})).status == 200
        (received,) = engine.received
        assert sent in received.body.replace(b" ", b"")
        assert received.body.count(b"priority") == 1
        assert headers.PRIORITY not in received.headers


async def test_a_client_may_not_choose_its_own_priority_in_the_engine() -> None:
    engine = ScriptedEngine("pod-0", streams(GOOD))
    async with running(engine, engine_priority="vllm") as gateway:
        assert (await gateway.post(ask(priority=-99))).status == 200
        assert b'"priority":0' in engine.received[0].body
        assert (await gateway.post(ask())).status == 200
        assert b"priority" not in engine.received[1].body


async def test_a_request_wakes_a_model_that_sleeps() -> None:
    engine = ScriptedEngine("pod-0", streams(GOOD))
    await engine.start()
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    async with running(engine, wait=0, models=["m"], activation_timeout_s=60.0) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask())) for _ in range(3)]
        await eventually(lambda: waiting(gateway) == 3)
        assert 'warmroute_gateway_queue_requests{model="m"} 3.0' in (await gateway.get("/metrics")).body.decode()
        await engine.start(port)
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 3


@pytest.mark.parametrize(("activation_s", "refused"), [(0.0, False), (0.2, True)])
async def test_a_model_that_does_not_wake_is_503(activation_s: float, refused: bool) -> None:
    engine = ScriptedEngine("pod-0", streams(GOOD))
    await engine.start()
    await engine.stop()
    async with running(engine, wait=0, models=["m"], activation_timeout_s=activation_s) as gateway:
        answer = await gateway.post(ask())
        assert answer.status == 503
        assert answer.json["error"]["code"] == "no_engine"
        assert int(answer.headers["Retry-After"]) >= 1
        text = (await gateway.get("/metrics")).body.decode()
        assert ('queue_refused_total{reason="asleep"} 1.0' in text) == refused


async def test_requests_that_wait_when_the_gateway_stops_get_an_error() -> None:
    gate = Gate()
    async with running(ScriptedEngine("pod-0", gate), max_pod_requests=1, queue_timeout_s=PATIENT_S) as gateway:
        tasks = [asyncio.create_task(gateway.post(ask()))]
        await eventually(lambda: gate.inside == 1)
        await queued(gateway, 1, tasks)
        gateway.app[ROOM].refuse_all()
        answer = await tasks[1]
        assert answer.status == 503
        assert answer.json["error"]["code"] == "stopping"
        gate.turns.release()
        assert (await tasks[0]).status == 200


@pytest.mark.parametrize("script", [streams(GOOD), answers(200, b'{"choices": []}')])
async def test_without_the_queue_nothing_waits(script: Script) -> None:
    async with running(ScriptedEngine("pod-0", script), queue_timeout_s=0) as gateway:
        answers_ = await asyncio.gather(*(gateway.post(ask()) for _ in range(20)))
        assert {answer.status for answer in answers_} == {200}
        assert "warmroute_gateway_queue_seconds_count 0.0" in (await gateway.get("/metrics")).body.decode()
