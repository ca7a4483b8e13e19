"""A cluster with InferencePools and InferenceObjectives: a scripted API server for each kind, under one URL."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import web
from aiohttp.test_utils import TestServer

from router.fleet.discovery import EngineAddress
from router.kubernetes.api import Cluster
from router.kubernetes.login import _from_kubeconfig
from router.settings.gateway import GatewaySettings
from router.startup.sources import make_discovery
from tests.router.kubernetes.kube import Json, ScriptedApi

POOL = "llama"
SELECTOR = "app=engine"


def pool(
    name: str = POOL, *, ports: tuple[int, ...] = (8000,), labels: dict[str, str] | None = None, **spec: Any
) -> Json:
    """Return an InferencePool as the API server writes it; `spec` overrides the other arguments."""
    given = {
        "selector": {"matchLabels": labels or {"app": "engine"}},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"group": "", "kind": "Service", "name": "picker", "port": {"number": 9002}},
        **spec,
    }
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
        "spec": {key: value for key, value in given.items() if value is not None},
    }


def objective(name: str, priority: Any, pool: str = POOL, **ref: Any) -> Json:
    """Return an InferenceObjective. With priority None, it has no priority."""
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
        "spec": {"poolRef": {"name": pool, **ref}, **({} if priority is None else {"priority": priority})},
    }


@dataclass
class ScriptedCluster:
    """One API server for the pools, one for the objectives, and in `pods` one for each selector that lists pods."""

    pools: ScriptedApi = field(
        default_factory=lambda: ScriptedApi(("fieldSelector", f"metadata.name={POOL}"), "InferencePoolList")
    )
    objectives: ScriptedApi = field(
        default_factory=lambda: ScriptedApi(("labelSelector", ""), "InferenceObjectiveList")
    )
    pods: dict[str, ScriptedApi] = field(default_factory=dict)

    def of(self, selector: str = SELECTOR) -> ScriptedApi:
        """Return the API server that lists the pods with these labels."""
        return self.pods.setdefault(selector, ScriptedApi(("labelSelector", selector)))

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        return await self.of(request.query["labelSelector"]).handle(request)

    @contextlib.asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[str]:
        """Serve on a loopback port, and yield the path of a kubeconfig for it."""
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/ns/pods", self._pods)
        app.router.add_get("/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools", self.pools.handle)
        path = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/ns/inferenceobjectives"
        app.router.add_get(path, self.objectives.handle)
        async with TestServer(app, handler_cancellation=True, shutdown_timeout=0.01) as server:
            config = folder / "kubeconfig"
            config.write_text(f"""
current-context: c
clusters: [{{name: c, cluster: {{server: "{server.make_url("/")}"}}}}]
users: [{{name: u, user: {{token: {self.pools.token}}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u, namespace: ns}}}}]
""")
            with mock.patch.dict(os.environ, KUBECONFIG=str(config)):
                yield str(config)


def flags(*more: str) -> GatewaySettings:
    """Return the settings of a gateway that follows the pool."""
    has_targets = any(flag.startswith("--kube-targets") for flag in more)
    return GatewaySettings.load([*([] if has_targets else [f"--inference-pool={POOL}"]), *more], prog="g", environ={})


class Seen:
    """The sets that a discovery has yielded."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.discovery = make_discovery(settings)
        self.sets: list[frozenset[EngineAddress]] = []

    async def run(self) -> None:
        """Follow for ever."""
        async for addresses in self.discovery.watch():
            self.sets.append(addresses)

    def urls(self) -> list[str]:
        """Return the URLs of the engines that take requests."""
        return sorted(address.url for address in self.sets[-1] if address.is_ready)


@contextlib.asynccontextmanager
async def at_once(config: str) -> AsyncIterator[None]:
    """Read the file's credentials without a thread, because virtual time does not wait for threads."""
    cluster = _from_kubeconfig(config, None)

    async def known(*_: object, **__: object) -> Cluster:
        return cluster

    with mock.patch("router.startup.sources.login", known):
        yield


@contextlib.asynccontextmanager
async def following(cluster: ScriptedCluster, folder: Path, *more: str) -> AsyncIterator[Seen]:
    """Follow the pool's engines with a discovery made from flags."""
    async with cluster.serving(folder) as config, at_once(config):
        seen = Seen(flags(*more))
        task = asyncio.create_task(seen.run())
        try:
            yield seen
        finally:
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled(), "discovery ended by itself"
