"""The picker of a gateway that follows a pool: priorities by InferenceObjective, and separate queues by fairness id."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from router.startup.parts import DISCOVERY, FLEET, OBJECTIVES, ROOM
from tests.router.kubernetes.kube import pod
from tests.router.kubernetes.kube_inference import POOL, ScriptedCluster, objective, pool
from tests.router.picker.proxy import PROMPT, Talk, endpoint, request_body, request_headers, response_headers
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, eventually, running

ASKED = {"model": "m", "prompt": PROMPT}
SETTINGS: dict[str, Any] = {
    "inference_objectives": True,
    "ext_proc_port": 0,
    "max_pod_requests": 1,
    "queue_timeout_s": 30.0,
}
NAMED = "x_gateway_inference_objective"
OWNED = "x_gateway_inference_fairness_id"


@contextlib.asynccontextmanager
async def picking(folder: Path, *engines: ScriptedEngine, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway that follows a pool of these engines, which are one pod at several ports."""
    cluster = ScriptedCluster()
    for name, priority in (("batch", -5), ("plain", 0), ("chat", 10)):
        cluster.objectives.put(objective(name, priority))
    for engine in engines:
        await engine.start()
    ports = tuple(int(engine.url.rpartition(":")[2]) for engine in engines)
    cluster.pools.put(pool(ports=ports))
    cluster.of().put(pod("vllm-0", "127.0.0.1"))
    async with cluster.serving(folder):
        given = {} if "kube_targets" in settings else {"inference_pool": POOL}
        async with running(*engines, **{**SETTINGS, **given, **settings}) as gateway:
            objectives = gateway.app[OBJECTIVES]
            assert objectives is not None
            await eventually(lambda: len(objectives) == 3)
            yield gateway


@contextlib.asynccontextmanager
async def busy(gateway: Gateway) -> AsyncIterator[Talk]:
    """Fill the one engine with as many requests as it may have."""
    async with Talk(gateway) as first:
        await first.ask(ASKED)
        assert first.picked
        yield first


async def end(talk: Talk) -> None:
    await talk.tell(response_headers(200, is_end=True))


async def test_an_objective_below_zero_is_shed_at_once_and_others_wait(tmp_path: Path) -> None:
    async with picking(tmp_path, ScriptedEngine("a", answers(200))) as gateway:
        async with Talk(gateway) as alone:
            await alone.ask(ASKED, **{NAMED: "batch"})
            assert alone.picked, "if there is room, the request is served"
            await end(alone)
        async with busy(gateway), contextlib.AsyncExitStack() as stack:
            async with Talk(gateway) as shed:
                await shed.ask(ASKED, **{NAMED: "batch"})
                status, error = shed.refusal
                assert (status, error["code"]) == (429, "overloaded")
                assert "objective has a priority below 0" in error["message"]
            waits = []
            for head in ({}, {NAMED: "plain"}, {NAMED: "nobody knows"}, {"x_warmroute_priority": "-5"}):
                talk = await stack.enter_async_context(Talk(gateway))
                waits.append(asyncio.create_task(talk.ask(ASKED, **head)))
            await eventually(lambda: gateway.app[ROOM].waiting()["m"] == 4)
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        metrics = (await gateway.get("/metrics")).body.decode()
        assert 'warmroute_gateway_queue_refused_total{reason="shed"} 1.0' in metrics
        assert "warmroute_gateway_inference_objectives 3.0" in metrics
        assert "warmroute_gateway_inference_pool_valid 1.0" in metrics
        ready = (await gateway.get("/ready")).json
        assert ready["objectives"] == {"known": 3, "problem": None}
        assert ready["discovery"]["pool_valid"] is True


async def order(gateway: Gateway, asked: list[dict[str, Any]]) -> list[int]:
    """Return the order in which requests with these headers are served, if they come while the one engine is full."""
    let_go: list[int] = []

    async def ask(number: int, head: dict[str, Any]) -> None:
        async with Talk(gateway) as talk:
            await talk.ask(ASKED, **head)
            assert talk.picked
            let_go.append(number)
            await end(talk)

    async with busy(gateway) as first, asyncio.TaskGroup() as group:
        for number, head in enumerate(asked):
            group.create_task(ask(number, head))
            await eventually(lambda: gateway.app[ROOM].waiting()["m"] == number + 1)  # noqa: B023
        await end(first)
    return let_go


async def test_the_objectives_priority_decides_which_request_is_first(tmp_path: Path) -> None:
    async with picking(tmp_path, ScriptedEngine("a", answers(200))) as gateway:
        head = [{}, {NAMED: "plain"}, {NAMED: "chat"}, {NAMED: "chat", "x_warmroute_priority": "-9"}]
        found = await order(gateway, head)
        assert set(found[:2]) == {2, 3}, "the operator's priority overrides the client's"


async def test_fairness_ids_wait_in_lines_of_their_own(tmp_path: Path) -> None:
    async with picking(tmp_path, ScriptedEngine("a", answers(200))) as gateway:
        head = [{OWNED: "greedy"}] * 4 + [{OWNED: "modest"}]
        assert (await order(gateway, head)).index(4) <= 1
        assert (await order(gateway, [{} for _ in range(5)])).index(4) == 4


TENANTS = """
tenants:
  - {{name: low, keys: [{{sha256: "{low}"}}], highest_priority: -1}}
  - {{name: high, keys: [{{sha256: "{high}"}}], highest_priority: 3}}
"""


async def test_no_tenant_gains_more_than_it_may(tmp_path: Path) -> None:
    keys = {name: f"sk-{name}" for name in ("low", "high")}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    (tmp_path / "tenants.yaml").write_text(TENANTS.format(**digests))
    settings = {"tenants_file": str(tmp_path / "tenants.yaml")}
    async with picking(tmp_path, ScriptedEngine("a", answers(200)), **settings) as gateway:
        seen: dict[str, tuple[int, bool, str]] = {}
        for name, key in keys.items():
            async with Talk(gateway) as talk:
                head = {NAMED: "chat", OWNED: "other", "authorization": f"Bearer {key}"}
                await talk.ask(ASKED, **head)
                exchange = talk.call._exchange
                assert exchange is not None
                assert exchange.inbound is not None
                seen[name] = (exchange.inbound.priority, exchange.arrival.urgency.is_sheddable, exchange.arrival.flow)
                await end(talk)
        assert seen == {"low": (-1, False, "low"), "high": (3, False, "high")}, (
            "no request is shed unless its objective says so"
        )


async def test_a_pool_without_objectives_is_a_pool(tmp_path: Path) -> None:
    cluster = ScriptedCluster()
    engine = ScriptedEngine("a", answers(200))
    await engine.start()
    cluster.pools.put(pool(ports=(int(engine.url.rpartition(":")[2]),)))
    cluster.of().put(pod("a", "127.0.0.1"))
    async with cluster.serving(tmp_path):
        given = {"inference_pool": POOL}
        async with running(engine, **{**SETTINGS, **given}) as gateway, Talk(gateway) as talk:
            await talk.ask(ASKED, **{NAMED: "chat"})
            assert talk.picked == [endpoint(engine)]
            await end(talk)
            ready = (await gateway.get("/ready")).json
            assert (ready["ready"], ready["objectives"]) == (True, {"known": 0, "problem": None})
            cluster.pools.remove(POOL)
            await eventually(lambda: not gateway.app[DISCOVERY].status().is_pool_valid)
            ready = await gateway.ready_for_operators()
            assert (ready["ready"], ready["discovery"]["pool_valid"]) == (True, False)
            assert "there is no InferencePool" in ready["discovery"]["problem"]
            metrics = (await gateway.get("/metrics")).body.decode()
            assert "warmroute_gateway_inference_pool_valid 0.0" in metrics
            assert "warmroute_gateway_inference_objectives 0.0" in metrics


async def test_ranks_at_several_ports_are_picked_each_by_itself(tmp_path: Path) -> None:
    """As in the conformance suite's test of data parallelism, requests name a pod's address, with or without a port."""
    engines = [ScriptedEngine(None, answers(200)) for _ in range(3)]
    async with picking(tmp_path, *engines, allow_policy_header=True) as gateway:
        assert len(gateway.app[FLEET].pods("m")) == 3
        ends = [endpoint(engine) for engine in engines]
        for asked, allowed in (
            ("127.0.0.1", ends),
            (ends[1], ends[1:2]),
            (f"{ends[0]}, {ends[2]}", [ends[0], ends[2]]),
        ):
            for number in range(6):
                async with Talk(gateway) as talk:
                    fields = {**ASKED, "prompt": f"{asked} {number}" * 100}
                    await talk.tell(request_headers(test_epp_endpoint_selection=asked), request_body(fields))
                    assert set(talk.picked) <= set(allowed)
                    await end(talk)
