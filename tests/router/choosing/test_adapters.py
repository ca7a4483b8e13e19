"""Adapters that a vLLM lists share the base model's pods: they share load and speed, but each has its own prefixes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from engine.contract import headers
from router.startup.parts import FLEET
from tests.router.endpoints.test_engine_metrics import MeteredEngine, pods
from tests.router.fleet.pages import Load, vllm_page
from tests.router.rig.helpers import Gateway, event, eventually, running, stalls_after

PROMPT = "the same words " * 200


class AdapterEngine(MeteredEngine):
    """Serves base, and the adapters sql and law on it."""

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": "base", "owned_by": self.owner, "parent": None}
        adapters = [{"id": name, "owned_by": self.owner, "parent": "base"} for name in ("sql", "law")]
        return web.json_response({"object": "list", "data": [base, *adapters]})


async def ask(gateway: Gateway, model: str) -> tuple[str, int]:
    """Return the pod, and the tokens that it was believed to hold."""
    answer = await gateway.post({"model": model, "prompt": PROMPT, "stream": True})
    assert answer.status == 200
    return answer.pod, int(answer.headers[headers.PREDICTED_CACHED])


def using(*adapters: str, most: int = 2) -> bytes:
    return vllm_page([Load(1.0)], slots=[(1.8e9, most, ",".join(adapters), "")])


async def test_models_of_one_pod_share_its_load_and_not_their_prefixes() -> None:
    engine = AdapterEngine(vllm_page([Load()]))
    async with running(engine, policy="predicted_ttft") as gateway:
        fleet = gateway.app[FLEET]
        assert fleet.pods("base") == fleet.pods("sql") == fleet.pods("law")
        (pod,) = fleet.pods("base")
        assert pod.facts.adapters == {"sql", "law"}
        assert [(await ask(gateway, model))[1] for model in ("base", "sql", "law")] == [0, 0, 0]
        assert all([(await ask(gateway, model))[1] > 0 for model in ("base", "sql", "law")])
        engine.script = stalls_after([event("a")])
        held = asyncio.create_task(gateway.post({"model": "sql", "prompt": PROMPT, "stream": True}))
        await eventually(lambda: pod.in_flight == 1)
        (shown,) = await pods(gateway)
        assert shown["load"]["in_flight"] == 1, "the base model's next request must see this load"
        held.cancel()
        await asyncio.wait((held,))


async def test_the_pod_that_has_the_adapter_loaded_gets_its_requests() -> None:
    engines = [AdapterEngine(using(*loaded)) for loaded in (("law",), ("sql",))]
    async with running(*engines, policy="predicted_ttft") as gateway:
        by_url = {pod.url: pod for pod in gateway.app[FLEET].pods("base")}
        lawyer, clerk = (by_url[engine.url] for engine in engines)
        await eventually(lambda: lawyer.adapters.loaded == ("law",) and clerk.adapters.loaded == ("sql",))
        for model, pod in (("law", lawyer), ("sql", clerk)) * 2:
            assert (await ask(gateway, model))[0] == pod.pod_id
        shown = {pod["pod"]: pod["adapters_loaded"] for pod in await pods(gateway)}
        assert shown == {lawyer.pod_id: ["law"], clerk.pod_id: ["sql"]}
        explained = (await gateway.post({"model": "law", "prompt": "x"}, path="/v1/route/explain")).json
        waits = {pod["pod"]: pod["view"]["adapter_s"] for pod in explained["pods"]}
        assert waits[lawyer.pod_id] == 0 < waits[clerk.pod_id]
        for engine in engines:
            engine.page = vllm_page([Load()])
        clock = asyncio.get_running_loop().time
        await eventually(lambda: all(pod.state.requests(clock()) == 0 for pod in (lawyer, clerk)), deadline_s=60)
