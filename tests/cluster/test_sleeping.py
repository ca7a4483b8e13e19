"""A model at 0 replicas: requests wait, their number is exported, an engine starts, and all are answered."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.cluster.cluster import NAMESPACE, RELEASE, do, kubectl, pods

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ENGINE = f"{RELEASE}-engine-sim"
ENGINES = f"app.kubernetes.io/instance={RELEASE},warmroute.io/model=sim"
GATEWAYS = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=gateway"
REPLICAS = 3
REQUESTS = 8
METRIC = 'warmroute_gateway_queue_requests{model="sim"}'


def waiting() -> float:
    """Return what KEDA would read from Prometheus: the sum over the gateways."""
    total = 0.0
    for pod in pods(GATEWAYS):
        text = kubectl("get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:9090/proxy/metrics")
        total += sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(METRIC))
    return total


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> tuple[int, str]:
    body = {"model": "sim", "prompt": f"Is anybody awake? ({number})", "max_tokens": 4, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        return answer.status, await answer.text()


async def test_a_request_wakes_a_model_that_sleeps(url: str) -> None:
    await do("scale", f"deployment/{ENGINE}", "--replicas=0")
    try:
        await do("wait", "--for=delete", "pod", "--selector", ENGINES, "--timeout=120s", timeout_s=130)
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group, asyncio.timeout(180):
            asked = [group.create_task(ask(session, url, number)) for number in range(REQUESTS)]
            while await asyncio.to_thread(waiting) < REQUESTS:
                assert not any(task.done() for task in asked), "no request waits for a sleeping model"
                await asyncio.sleep(0.5)
            await do("scale", f"deployment/{ENGINE}", "--replicas=1")  # as KEDA would do; KEDA need not be installed
        for task in asked:
            status, text = task.result()
            assert status == 200, text
            assert text.rstrip().endswith("data: [DONE]")
        assert await asyncio.to_thread(waiting) == 0
    finally:
        await do("scale", f"deployment/{ENGINE}", f"--replicas={REPLICAS}")
        await do("rollout", "status", f"deployment/{ENGINE}", "--timeout=180s", timeout_s=190)
