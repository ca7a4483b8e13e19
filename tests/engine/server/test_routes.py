"""The routes that do not generate."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from engine.contract import headers
from engine.contract.keys import canonical_chat, key_seed, prefix_keys
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import MAX_FAILURES_IN_A_ROW
from engine.sched.plan import StepPlan, StepResult
from engine.server.service import ServerState
from engine.startup.app import listening
from engine.startup.settings import EngineSettings
from engine.startup.tasks import BackendStuck
from tests.engine.server.conftest import FAST, MODEL, SLOW, Engine, Start, wait_until
from tests.redis_server import RedisServer

CHAT = "/v1/chat/completions"
LONG = [
    {"role": "system", "content": "You know everything about the deployment. " * 40},
    {"role": "user", "content": "hi"},
]


def samples(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def test_the_list_of_models_says_which_pod_serves_what(engine: Engine) -> None:
    async with engine.http.get(engine.url + "/v1/models") as response:
        assert response.headers[headers.POD] == "pod-1"
        assert int(response.headers[headers.EPOCH]) == engine.service.epoch
        body = await response.json()
    assert [(card["id"], card["object"], card["max_model_len"]) for card in body["data"]] == [(MODEL, "model", 4096)]


async def test_a_probe_says_how_large_the_fleet_is(engine: Engine) -> None:
    heard: list[int] = []
    engine.state.service = replace(engine.service, on_fleet=heard.append)
    for said in ("1000", "64", "", "-1", "1e3", "9" * 10, "x"):
        async with engine.http.get(engine.url + "/v1/models", headers={headers.PODS: said}) as response:
            assert response.status == 200
    assert heard == [1000, 64]


@pytest.mark.parametrize("path", ["meta-llama/Llama-3-8B", "meta-llama%2FLlama-3-8B", "meta-llama%2fLlama-3-8B"])
async def test_a_models_name_may_be_encoded_or_not(engine: Engine, path: str) -> None:
    name = "meta-llama/Llama-3-8B"
    engine.state.service = replace(engine.service, model=replace(engine.service.model, name=name))
    async with engine.http.get(URL(f"{engine.url}/v1/models/{path}", encoded=True)) as response:
        assert (response.status, (await response.json())["id"]) == (200, name)
    assert 'path="/v1/models/{model}"' in await engine.text("/metrics"), "clients cannot create time series"


@pytest.mark.parametrize("text", ["hello there", "Größe 你好 🙂 <|im_end|>", "", " \n"])
async def test_tokenize_and_detokenize_are_inverse(engine: Engine, text: str) -> None:
    status, tokens = await engine.ask("/tokenize", prompt=text, return_token_strs=True, model=MODEL)
    assert status == 200
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 4096
    assert await engine.ask("/detokenize", tokens=tokens["tokens"], model=MODEL) == (200, {"prompt": text})


async def test_tokenize_renders_chats_as_generation_does(engine: Engine) -> None:
    _, tokens = await engine.ask("/tokenize", messages=LONG)
    _, answer = await engine.ask(CHAT, messages=LONG, max_tokens=1)
    assert tokens["count"] == answer["usage"]["prompt_tokens"]
    assert tokens["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "truncate": 1}, "truncate"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [10**18]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_tokenize_refuses_by_name(engine: Engine, path: str, fields: dict[str, Any], param: str) -> None:
    status, body = await engine.ask(path, **fields)
    assert (status, body["error"]["param"]) == (400, param)


async def test_held_keys_are_those_a_gateway_computes(engine: Engine) -> None:
    keys = prefix_keys(canonical_chat(LONG), key_seed(MODEL, "", "tenant"))
    await engine.ask(CHAT, messages=LONG, max_tokens=1, cache_salt="tenant")
    async with engine.http.get(engine.url + "/debug/held_keys") as response:
        held = await response.json()
    assert held["epoch"] == engine.service.epoch
    assert held["stride"] == 256
    gpu = held["keys"]["gpu"]
    assert gpu == [f"{key:016x}" for key in keys[: len(gpu)]]
    assert len(gpu) >= len(keys) - 1
    assert (held["keys"]["host"], held["keys"]["disk"]) == ([], [])


async def test_reset_forgets_every_prefix(engine: Engine) -> None:
    async def cached() -> int:
        _, body = await engine.ask(CHAT, messages=LONG, max_tokens=1)
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached() == 0
    assert await cached() > 100
    status, body = await engine.ask("/reset_prefix_cache")
    assert status == 200
    assert body["freed_blocks"] > 0
    assert engine.service.scheduler.held_keys() == ((), (), ())
    assert await cached() == 0


async def test_metrics_count_what_happened(engine: Engine) -> None:
    for _ in range(2):
        _, body = await engine.ask(CHAT, messages=LONG, max_tokens=5)
    usage = body["usage"]
    found = samples(await engine.text("/metrics"))
    assert found["vllm:prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert found["vllm:generation_tokens_total"] == 10
    assert found["vllm:prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert found["vllm:prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:request_queue_time_seconds_count"] == 2
    assert found["vllm:request_queue_time_seconds_sum"] <= found["vllm:time_to_first_token_seconds_sum"]
    assert found["vllm:inter_token_latency_seconds_count"] == 8
    assert found["vllm:request_success_total"] == 2
    assert found["vllm:num_preemptions_total"] == 0
    assert found["warmroute_step_seconds_count"] == 10
    assert found["warmroute_http_responses_total"] == 2


async def test_metrics_show_the_load_of_the_moment(start: Start) -> None:
    async with start(SLOW, max_running=1, max_step_tokens=64) as engine:
        tasks = [asyncio.ensure_future(engine.ask(CHAT, messages=LONG, max_tokens=20)) for _ in range(2)]
        # Both counts are needed: the first request waits alone for a moment before its first step.
        await wait_until(lambda: (load := engine.service.scheduler.load()).running == load.waiting == 1)
        found = samples(await engine.text("/metrics"))
        assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (1, 1)
        assert 0 < found["vllm:kv_cache_usage_perc"] < 1
        await asyncio.gather(*tasks)


async def test_metrics_show_how_publishing_goes(start: Start, redis_server: RedisServer) -> None:
    async with start(redis_url=redis_server.url) as engine:
        state = engine.service.registry
        await wait_until(lambda: state().connected and state().snapshots == 1)
        await engine.ask(CHAT, messages=LONG, max_tokens=2)
        before = state()
        await wait_until(lambda: state().deltas > before.deltas and not state().pending_keys)
        found = samples(await engine.text("/metrics"))
        assert (found["warmroute_registry_configured"], found["warmroute_registry_connected"]) == (1, 1)
        assert before.deltas < found["warmroute_registry_deltas_total"] <= state().deltas
        assert found["warmroute_registry_snapshots_total"] == 1
        assert found["warmroute_registry_failures_total"] == found["warmroute_registry_dropped_keys_total"] == 0
        redis_server.stop()
        await wait_until(lambda: state().failures > 0)
        found = samples(await engine.text("/metrics"))
        assert found["warmroute_registry_connected"] == 0
        assert found["warmroute_registry_failures_total"] >= 1


async def test_metrics_of_an_engine_without_a_registry(engine: Engine) -> None:
    found = samples(await engine.text("/metrics"))
    exported = [name for name in found if name.startswith("warmroute_registry_") and not name.endswith("_created")]
    assert len(exported) == 7
    assert not any(found[name] for name in exported)


async def test_preemptions_are_counted_once_each(start: Start) -> None:
    small = replace(FAST, kv_tokens=16 * 16)
    async with start(small) as engine:
        answers = await asyncio.gather(
            *(engine.ask("/v1/completions", prompt=f"{i} " * 20, max_tokens=150) for i in range(4))
        )
        assert [status for status, _ in answers] == [200] * 4
        expected = engine.service.scheduler.stats().preemptions
        assert expected > 0
        for _ in range(2):
            assert samples(await engine.text("/metrics"))["vllm:num_preemptions_total"] == expected


async def test_health_and_refusals_follow_the_engines_life(engine: Engine) -> None:
    async def health() -> tuple[int, str]:
        async with engine.http.get(engine.url + "/health") as response:
            return response.status, (await response.json())["status"]

    assert await health() == (200, "ok")
    engine.state.is_draining = True
    assert await health() == (503, "draining")
    async with engine.post(CHAT, messages=LONG) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
    engine.state.is_draining = False


async def test_health_fails_when_the_step_loop_has_died(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr(engine.service.scheduler, "schedule", broken)
    status, body = await engine.ask(CHAT, messages=LONG)
    assert (status, body["error"]["type"]) == (500, "server_error")
    async with engine.http.get(engine.url + "/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "failed"})
    status, body = await engine.ask(CHAT, messages=LONG)
    assert (status, body["error"]["type"]) == (503, "service_unavailable_error")


async def test_health_fails_after_steps_that_all_failed(start: Start) -> None:
    """A pod that answers only errors must be restarted, for example because its card has fallen off the bus."""

    class Lost:
        max_in_flight = 1

        async def run(self, plan: StepPlan) -> StepResult:
            raise RuntimeError("device lost")

        async def close(self) -> None:
            """Nothing to free."""

    async with start(backend=Lost()) as engine:

        async def health() -> int:
            async with engine.http.get(engine.url + "/health") as response:
                return response.status

        for _ in range(MAX_FAILURES_IN_A_ROW):
            assert await health() == 200
            status, body = await engine.ask(CHAT, messages=LONG)
            assert (status, body["error"]["type"]) == (500, "server_error")
        await wait_until(lambda: not engine.service.loop.is_alive)
        assert await health() == 503
        status, body = await engine.ask(CHAT, messages=LONG)
        assert (status, body["error"]["type"]) == (503, "service_unavailable_error")


class Hanging:
    """A device whose first step never ends."""

    max_in_flight = 1

    def __init__(self, *, closes: bool) -> None:
        self._closes = closes

    async def run(self, plan: StepPlan) -> StepResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        if not self._closes:
            await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_health_fails_when_a_step_never_ends(start: Start, stream: bool) -> None:
    async with start(backend=Hanging(closes=True), step_deadline_s=0.2) as engine:
        status, body = await engine.ask(CHAT, messages=LONG, stream=stream)
        assert (status, body["error"]["type"]) == (500, "server_error")
        await wait_until(lambda: not engine.service.loop.is_alive)
        async with engine.http.get(engine.url + "/health") as response:
            assert (response.status, await response.json()) == (503, {"status": "failed"})


async def test_a_backend_with_a_step_that_never_ends_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.tasks.CLOSE_S", 0.1)

    async def life() -> None:
        async with start(backend=Hanging(closes=False), step_deadline_s=0.2) as engine:
            assert (await engine.ask(CHAT, messages=LONG))[0] == 500
            await wait_until(lambda: engine.service.loop.is_stuck)

    with pytest.raises(BackendStuck):
        await asyncio.wait_for(life(), 4)


async def test_the_port_answers_before_the_model_is_loaded() -> None:
    settings = EngineSettings(model="none", device="sim", port=0)
    async with listening(settings, ServerState(), EngineMetrics("m")) as ports, ClientSession() as http:
        for method, path, status in (
            ("GET", "/health", 503),
            ("GET", "/metrics", 200),
            ("GET", "/v1/models", 503),
            ("GET", "/v1/models/none", 503),
            ("POST", CHAT, 503),
            ("POST", "/tokenize", 503),
        ):
            async with http.request(method, f"http://127.0.0.1:{ports.clients}{path}", json={}) as response:
                assert response.status == status, path


async def test_a_chat_without_a_template_is_refused_and_says_so(engine: Engine) -> None:
    engine.state.service = replace(engine.service, model=replace(engine.service.model, template=None))
    status, body = await engine.ask(CHAT, messages=LONG)
    assert status == 400
    assert "no chat template" in body["error"]["message"]
    assert (await engine.ask("/v1/completions", prompt="x"))[0] == 200


async def test_a_defect_in_a_handler_is_a_500_without_details(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.service.scheduler, "held_keys", lambda: 1 // 0)
    async with engine.http.get(engine.url + "/debug/held_keys") as response:
        assert response.status == 500
        assert "zero" not in await response.text()
