"""An InferencePool and its objectives on a real API server, with only the rights that the pages name.

If the cluster lacks the kinds, the test defines them (`tests/charts/existing/inference_schemas.py`). If the cluster
does not allow that, the test is skipped."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from router.fleet.discovery import EngineAddress
from router.settings.gateway import GatewaySettings
from router.startup.sources import make_discovery, make_objectives
from tests.charts.existing.inference_schemas import SCHEMAS, definition
from tests.cluster.cluster import NAMESPACE, RELEASE, do, kubectl
from tests.cluster.test_discovery_cluster import LABEL, idle_pods, ip, kubeconfig

__all__ = ["idle_pods", "kubeconfig"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
POOL = "idle"
ROLE = [
    {
        "apiGroups": ["inference.networking.k8s.io"],
        "resources": ["inferencepools"],
        "resourceNames": [POOL],
        "verbs": ["list", "watch"],
    },
    {
        "apiGroups": ["inference.networking.x-k8s.io"],
        "resources": ["inferenceobjectives"],
        "verbs": ["list", "watch"],
    },
]


def pool(labels: dict[str, str], *ports: int) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": POOL},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def objective(name: str, priority: int) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": {"priority": priority, "poolRef": {"name": POOL}},
    }


async def apply(thing: dict[str, Any]) -> None:
    await asyncio.to_thread(kubectl, "apply", "--filename", "-", text=json.dumps(thing))


@pytest.fixture
def kinds(release: None) -> Iterator[None]:
    """Provide the kinds, and the gateway account's right to read them; remove at the end what was made."""
    made = []
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "pools"}, "rules": ROLE}
    try:
        for kind in SCHEMAS:
            wanted = definition(kind)
            name = wanted["metadata"]["name"]
            if subprocess.run(["kubectl", "get", "crd", name], capture_output=True, check=False).returncode == 0:
                continue
            words = ["kubectl", "create", "--filename", "-"]
            done = subprocess.run(words, input=json.dumps(wanted), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{name} cannot be defined here: {done.stderr.strip()}")
            made.append(name)
            kubectl("wait", f"crd/{name}", "--for=condition=Established", "--timeout=30s")
        kubectl("apply", "--filename", "-", text=json.dumps(role))
        kubectl("create", "rolebinding", "pools", "--role=pools", f"--serviceaccount={NAMESPACE}:{RELEASE}-gateway")
        yield
    finally:
        kubectl("delete", "rolebinding,role", "pools", "--ignore-not-found")
        for name in made:
            kubectl("delete", "crd", name)


class Seen:
    """Collects what discovery reports about the pool."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.discovery = make_discovery(settings)
        objectives = make_objectives(settings)
        assert objectives is not None
        self.objectives = objectives
        self.addresses: frozenset[EngineAddress] = frozenset()

    async def follow(self) -> None:
        async for addresses in self.discovery.watch():
            self.addresses = addresses

    def ready(self) -> set[str]:
        return {address.url for address in self.addresses if address.is_ready}

    async def until(self, condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not condition():  # noqa: ASYNC110  # polls for exactly what is asserted
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"{what} within {deadline_s:g} s; {self.addresses}; {self.discovery.status()}")


@asynccontextmanager
async def following(config: Path) -> AsyncIterator[Seen]:
    line = [f"--kube-namespace={NAMESPACE}"]
    picker = [f"--inference-pool={POOL}", "--inference-objectives", "--ext-proc-port=9002"]
    with mock.patch.dict(os.environ, KUBECONFIG=str(config)):
        seen = Seen(GatewaySettings.load([*line, *picker], prog="gateway", environ={}))
        async with _following(seen):
            yield seen


@asynccontextmanager
async def _following(seen: Seen) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(seen.follow()), asyncio.create_task(seen.objectives.run())]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_pool_comes_changes_and_goes(kinds: None, kubeconfig: Path, idle_pods: list[str]) -> None:
    first, second = [await asyncio.to_thread(ip, name) for name in idle_pods]
    label, _, value = LABEL.partition("=")
    async with following(kubeconfig) as seen:
        await seen.until(
            lambda: "there is no InferencePool" in (seen.discovery.status().problem or ""), "a missing pool"
        )
        await apply(pool({label: value}, 9000, 9001))
        both = {f"http://{address}:{port}" for address in (first, second) for port in (9000, 9001)}
        await seen.until(lambda: seen.ready() == both, "each port of each pod")
        await apply(pool({label: value}, 9000))
        await seen.until(lambda: seen.ready() == {f"http://{first}:9000", f"http://{second}:9000"}, "one port")
        await do("label", "pod", "idle-a", "rank=1")
        await apply(pool({label: value, "rank": "1"}, 9000))
        await seen.until(lambda: seen.ready() == {f"http://{first}:9000"}, "the pods of another selector")
        for one in (objective("chat", 10), objective("batch", -1)):
            await apply(one)
        await seen.until(lambda: len(seen.objectives) == 2, "both objectives")
        assert [seen.objectives.priority(name) for name in ("chat", "batch", "nobody")] == [10, -1, None]
        await do("delete", "inferenceobjective", "batch")
        await seen.until(lambda: seen.objectives.priority("batch") is None, "one objective")
        await do("delete", "inferencepool", POOL)
        await seen.until(lambda: seen.discovery.status().is_pool_valid is False, "a pool that is gone")
        assert seen.ready() == {f"http://{first}:9000"}, "the last known pod stays"
        await do("delete", "inferenceobjective", "chat")
