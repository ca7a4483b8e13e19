"""A cluster from its users' point of view: kubectl, helm, and a watch that notes when pods change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "warmroute"
VALUES = (CHART / "values-demo.yaml", Path(__file__).with_name("values.yaml"))
RELEASE = "warmroute"
NAMESPACE = "warmroute"
EVENT_BYTES = 2**22
_ENVIRON = dict(os.environ)
"""The tests' own, which has the administrator's kubeconfig; a test may give its gateway another."""


def command(*words: str, timeout_s: float = 60.0, text: str | None = None) -> str:
    """Return the standard output of a program that must succeed within the deadline."""
    done = subprocess.run(
        words, input=text, capture_output=True, text=True, timeout=timeout_s, check=False, env=_ENVIRON
    )
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def kubectl(*words: str, timeout_s: float = 60.0, text: str | None = None) -> str:
    """Run `kubectl` in the release's namespace."""
    return command("kubectl", "--namespace", NAMESPACE, *words, timeout_s=timeout_s, text=text)


def kubectl_json(*words: str) -> Any:
    """Return the answer as JSON."""
    return json.loads(kubectl(*words, "--output", "json"))


async def do(*words: str, timeout_s: float = 60.0) -> str:
    """Run `kubectl` while the event loop goes on."""
    return await asyncio.to_thread(kubectl, *words, timeout_s=timeout_s)


def helm(*words: str, timeout_s: float = 300.0) -> str:
    """Run `helm` in the release's namespace."""
    return command("helm", "--namespace", NAMESPACE, *words, timeout_s=timeout_s)


def install(*sets: str) -> None:
    """Install the chart, or update it to these values, and wait until everything is ready."""
    files = [word for path in VALUES for word in ("--values", str(path))]
    given = [word for value in sets for word in ("--set", value)]
    wait = ("--wait", "--timeout", "240s", "--create-namespace")
    helm("upgrade", "--install", RELEASE, str(CHART), *files, *given, *wait)


def gateway_url() -> str:
    """Return the address of the gateway's Service on a node; unlike a port-forward, it outlives every pod."""
    service = kubectl_json("get", "service", f"{RELEASE}-gateway")
    node = kubectl_json("get", "nodes")["items"][0]
    address = next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")
    return f"http://{address}:{service['spec']['ports'][0]['nodePort']}"


def pods(selector: str) -> list[str]:
    """Return the sorted names of the pods that are not being deleted."""
    items = kubectl_json("get", "pods", "--selector", selector)["items"]
    return sorted(pod["metadata"]["name"] for pod in items if "deletionTimestamp" not in pod["metadata"])


@dataclass(slots=True)
class PodTimes:
    """When changes were first seen, in seconds of this machine's clock, by pod name."""

    ready: dict[str, float] = field(default_factory=dict)
    dying: dict[str, float] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    """Pods that existed when the watch began."""

    def saw(self, kind: str, pod: dict[str, Any]) -> None:
        """Note one event of the watch."""
        now_s, name = time.time(), pod["metadata"]["name"]
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())):
            self.ready.setdefault(name, now_s)
        if "deletionTimestamp" in pod["metadata"]:
            self.dying.setdefault(name, now_s)
        if kind == "DELETED":
            self.gone.setdefault(name, now_s)

    @property
    def new(self) -> set[str]:
        """Return the pods that became Ready during the watch."""
        return set(self.ready) - self.known


@contextlib.asynccontextmanager
async def watching(selector: str) -> AsyncIterator[PodTimes]:
    """Note what happens to the pods during the block. It uses kubectl's watch, not the product's own."""
    listed = await asyncio.to_thread(kubectl_json, "get", "pods", "--selector", selector)
    times = PodTimes(known={pod["metadata"]["name"] for pod in listed["items"]})
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?watch=true&labelSelector={selector.replace('=', '%3D')}"
    version = listed["metadata"]["resourceVersion"]
    process = await asyncio.create_subprocess_exec(
        "kubectl", "get", "--raw", f"{path}&resourceVersion={version}", stdout=subprocess.PIPE, limit=EVENT_BYTES
    )
    assert process.stdout is not None

    async def follow(lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            event = json.loads(line)
            times.saw(event["type"], event["object"])

    task = asyncio.create_task(follow(process.stdout))
    try:
        yield times
        assert not task.done(), "kubectl's watch of the pods has ended"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        task.cancel()
        await asyncio.wait((task,))


def settle(timeout_s: float = 180.0) -> None:
    """Wait until every workload has all its pods available, and no pod is being deleted."""
    give_up_at = time.monotonic() + timeout_s
    for workload in kubectl("get", "deployments,statefulsets", "--output", "name").split():
        kubectl("rollout", "status", workload, f"--timeout={timeout_s:g}s", timeout_s=timeout_s + 10)
    while any("deletionTimestamp" in pod["metadata"] for pod in kubectl_json("get", "pods")["items"]):
        assert time.monotonic() < give_up_at, f"deleted pods are still there after {timeout_s:g} s"
        time.sleep(0.5)
