"""`GET /v1/models` and `/v1/models/{model}`, asked by the official client and by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
from blockbuster import BlockBuster
from yarl import URL

from engine.contract.keys import key_seed, prefix_keys
from router.startup.parts import INDEX
from tests.router.rig.helpers import ScriptedEngine, event, running, streams

GOOD = streams([event("a"), b"data: [DONE]\n\n"])
NAMES = ["m", "meta-llama/Llama-3-8B", "org/a_b%2Fc/d?e#f", "~!$&'()*+,;=:@[]"]


async def test_a_model_is_retrieved_as_it_is_listed(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engine = ScriptedEngine("a", GOOD, models=NAMES)
    async with (
        running(engine) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        listed = {model.id: model for model in (await client.models.list()).data}
        assert set(listed) == set(NAMES)
        for name in NAMES:
            assert await client.models.retrieve(name) == listed[name]
        for name in ("meta-llama", "meta-llama/Llama-3-8B/", "M", "m/../m"):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.models.retrieve(name)
            assert missing.value.code == "model_not_found", name


@pytest.mark.parametrize("path", ["meta-llama/Llama-3-8B", "meta-llama%2FLlama-3-8B", "meta-llama%2fLlama-3-8B"])
async def test_a_models_name_may_be_encoded_or_not(path: str) -> None:
    async with running(ScriptedEngine("a", GOOD, models=NAMES)) as gateway:
        url = URL(f"{gateway.url}/v1/models/{path}", encoded=True)
        response = await gateway.session.get(url)
        assert (response.status, (await response.json())["id"]) == (200, NAMES[1])


def ask(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "x" * 2000, "stream": True}


async def test_an_adapter_that_no_engine_lists_goes_to_the_pods_of_its_base() -> None:
    """SGLang names adapters in this way. Beliefs are per adapter, because each adapter computes other KV."""
    engines = [ScriptedEngine("a", GOOD, models=["m"]), ScriptedEngine("b", GOOD, models=["n"])]
    async with running(*engines, policy="cache_aware") as gateway:
        for name in ("m", "m:sql", "m:sql", "m:law"):
            answer = await gateway.post(orjson.dumps(ask(name)))
            assert (answer.status, answer.pod) == (200, "a"), name
            assert engines[0].received[-1].body == orjson.dumps(ask(name))
        keys = {name: prefix_keys(b"x" * 2000, key_seed("m", name)) for name in ("", "sql", "law", "new")}
        held = {name: len(gateway.app[INDEX].match(keys[name], asyncio.get_running_loop().time())) for name in keys}
        for name in ("o:sql", "m:", ":m", ":", "m:sql:x"):
            missing = await gateway.post(ask(name))
            assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found"), name
            assert repr(name) in missing.json["error"]["message"]
    assert held == {"": 1, "sql": 1, "law": 1, "new": 0}
    assert not engines[1].received


async def test_a_name_that_is_served_is_no_adapter() -> None:
    engines = [ScriptedEngine("a", GOOD, models=["m"]), ScriptedEngine("b", GOOD, models=["m:v2"])]
    async with running(*engines, models=["m:asleep", "n"]) as gateway:
        assert [(await gateway.post(ask(name))).pod for name in ("m:v2", "m:v2", "m:v2:sql", "m:v3")] == [*"bbba"]
        asleep = [await gateway.post(ask(name)) for name in ("m:asleep", "n:sql")]
    assert [(answer.status, answer.json["error"]["code"]) for answer in asleep] == [(503, "no_engine")] * 2


async def test_a_model_without_an_engine_is_told_from_one_that_never_existed() -> None:
    async with running(ScriptedEngine("a", GOOD), models=["asleep"]) as gateway:
        asleep, missing = await gateway.get("/v1/models/asleep"), await gateway.get("/v1/models/nowhere")
        assert (await gateway.post({"model": "m", "prompt": "x", "stream": True})).status == 200
    assert (asleep.status, asleep.json["error"]["code"], "Retry-After" in asleep.headers) == (503, "no_engine", True)
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
    assert missing.json["error"]["type"] == "invalid_request_error"
