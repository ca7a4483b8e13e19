"""Discovery against a real API server, with only the rights of the gateway's service account."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from router.fleet.discovery import EngineAddress
from router.kubernetes.login import connect, login
from router.kubernetes.pod_source import KubernetesDiscovery
from tests.cluster.cluster import NAMESPACE, RELEASE, command, do, kubectl, kubectl_json
from tests.cluster.conftest import ApiServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LABEL = "test=discovery"
GRACE_S = 6
POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME, labels: {test: discovery}, annotations: {warmroute.io/port: "9000", warmroute.io/model: small}}
spec:
  terminationGracePeriodSeconds: GRACE
  containers:
    - name: idle
      image: IMAGE
      command: [sh, -c, "trap '' TERM; touch /tmp/ready; while :; do sleep 1; done"]
      readinessProbe: {exec: {command: [test, -f, /tmp/ready]}, periodSeconds: 1, failureThreshold: 1}
"""


class Followed:
    """Collects discovery's events."""

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self.discovery = discovery
        self.addresses: frozenset[EngineAddress] = frozenset()

    async def follow(self) -> None:
        async for addresses in self.discovery.watch():
            self.addresses = addresses

    def of(self, ip: str) -> EngineAddress | None:
        return next((address for address in self.addresses if address.url == f"http://{ip}:9000"), None)

    async def until(self, condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not condition():  # noqa: ASYNC110  # polls for exactly what is asserted
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"{what} within {deadline_s:g} s; {self.addresses}; {self.discovery.status()}")


@pytest.fixture
def kubeconfig(release: None, tmp_path: Path) -> Path:
    """Return a kubeconfig with the gateway's service account, for use from outside."""
    config = json.loads(command("kubectl", "config", "view", "--minify", "--raw", "--flatten", "--output", "json"))
    config["users"][0]["user"] = {"token": kubectl("create", "token", f"{RELEASE}-gateway").strip()}
    cluster = config["clusters"][0]["cluster"]
    assert base64.b64decode(cluster["certificate-authority-data"])
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def idle_pods(release: None) -> Iterator[list[str]]:
    """Yield two Ready pods that no gateway of the release watches."""
    names = ["idle-a", "idle-b"]
    make(*names)
    try:
        yield names
    finally:
        kubectl("delete", "pods", "--selector", LABEL, "--grace-period=0", "--force", "--ignore-not-found")
        kubectl("delete", "pods", *names, "--grace-period=0", "--force", "--ignore-not-found")


def make(*names: str) -> None:
    gateway = kubectl_json("get", "deployment", f"{RELEASE}-gateway")
    image = gateway["spec"]["template"]["spec"]["containers"][0]["image"]
    pods = [POD.replace("NAME", name).replace("GRACE", str(GRACE_S)).replace("IMAGE", image) for name in names]
    kubectl("apply", "--filename", "-", text="---".join(pods))
    kubectl("wait", *(f"pod/{name}" for name in names), "--for=condition=Ready", "--timeout=60s", timeout_s=70)


def ip(name: str) -> str:
    return str(kubectl_json("get", "pod", name)["status"]["podIP"])


@contextlib.asynccontextmanager
async def following(kubeconfig: Path) -> AsyncIterator[Followed]:
    credentials = partial(login, NAMESPACE, environ={**os.environ, "KUBECONFIG": str(kubeconfig)})
    followed = Followed(KubernetesDiscovery(partial(connect, credentials, LABEL), port="http"))
    task = asyncio.create_task(followed.follow())
    try:
        yield followed
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def test_readiness_labels_and_deletion(kubeconfig: Path, idle_pods: list[str]) -> None:
    first, second = [await asyncio.to_thread(ip, name) for name in idle_pods]
    async with following(kubeconfig) as seen:
        await seen.until(lambda: len(seen.addresses) == 2 and all(a.is_ready for a in seen.addresses), "two Ready pods")
        known = seen.of(first)
        assert known is not None
        assert known.model == "small"

        await do("exec", "idle-a", "--", "rm", "/tmp/ready")
        await seen.until(lambda: (a := seen.of(first)) is not None and not a.is_ready, "a pod that is not Ready")
        await do("exec", "idle-a", "--", "touch", "/tmp/ready")
        await seen.until(lambda: seen.of(first) == known, "the same pod, Ready again")

        await do("label", "pod", "idle-b", "test-")
        await seen.until(lambda: seen.of(second) is None, "no pod without the label")
        await do("label", "pod", "idle-b", LABEL)
        await seen.until(lambda: (a := seen.of(second)) is not None and a.is_ready, "the pod with its label back")

        await do("delete", "pod", "idle-a", "--wait=false")
        await seen.until(lambda: (a := seen.of(first)) is not None and not a.is_ready, "a pod that is to end")
        status = (await asyncio.to_thread(kubectl_json, "get", "pod", "idle-a"))["status"]
        assert any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"]), (
            "the deletion was seen"
        )
        await seen.until(lambda: seen.of(first) is None, "no pod that has ended")

        await do("wait", "pod/idle-a", "--for=delete", "--timeout=30s")
        await asyncio.to_thread(make, "idle-a")
        again = await asyncio.to_thread(ip, "idle-a")
        await seen.until(lambda: (a := seen.of(again)) is not None and a.is_ready, "the pod of the same name")
        now = seen.of(again)
        assert now is not None
        assert now.life != known.life
        assert seen.discovery.status().relists == {"start": 1}, "watches reported everything"
        assert seen.discovery.status().problem is None


async def test_an_api_server_that_goes_and_comes_back(
    kubeconfig: Path, idle_pods: list[str], api_server: ApiServer
) -> None:
    first = await asyncio.to_thread(ip, idle_pods[0])
    async with following(kubeconfig) as seen:
        await seen.until(lambda: len(seen.addresses) == 2 and all(a.is_ready for a in seen.addresses), "two Ready pods")
        before = seen.addresses
        await asyncio.to_thread(api_server.stop)
        await seen.until(lambda: seen.discovery.status().problem is not None, "the trouble, said")
        assert seen.addresses == before, "the last pods known stay"
        await asyncio.to_thread(api_server.start)
        await do("delete", "pod", idle_pods[0], "--wait=false")
        await seen.until(lambda: seen.of(first) is None, "the end of a pod deleted after the restart", 60)
        assert len(seen.addresses) == 1
