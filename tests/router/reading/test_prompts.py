"""Several prompts in one `/v1/completions` request: one pod computes all of them, chosen by the first one's keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.common.sse import DONE
from engine.contract import headers
from engine.contract.keys import key_seed, prefix_keys
from engine.contract.requests import Endpoint, request_head
from router.startup.parts import FLEET, INDEX
from router.views.types import PodId
from tests.router.rig.helpers import ScriptedEngine, answers, event, running, streams, usage_event

PROMPT = "x" * 6000
TOKENS = 1500


@pytest.mark.parametrize(
    ("prompt", "prompts", "further_bytes"),
    [
        ("one", 1, 0),
        (["one"], 1, 0),
        (["one", "two", "\N{SNOWMAN}"], 3, 6),
        ([1, 2, 3], 1, 0),
        ([[1, 2, 3]], 1, 0),
        ([[1, 2, 3], [4], [5, 6]], 3, 12),
        (["one", None, 5, {}], 4, 0),
    ],
)
def test_every_prompt_is_counted(prompt: object, prompts: int, further_bytes: int) -> None:
    head = request_head(Endpoint.COMPLETIONS, {"prompt": prompt})
    assert (head.prompts, head.further_bytes) == (prompts, further_bytes)


@pytest.mark.parametrize(("one", "is_exact"), [("some text " * 50, False), ([7] * 200, True)], ids=["text", "ids"])
async def test_all_prompts_are_load(one: Any, is_exact: bool) -> None:
    async with running(ScriptedEngine("a", answers(200))) as gateway:
        explained = [
            (await gateway.post({"prompt": prompt}, path="/v1/route/explain")).json
            for prompt in (one, [one], [one] * 8)
        ]
    alone, listed, batch = (about["prompt_tokens_estimated"] for about in explained)
    assert alone == listed
    assert batch == pytest.approx(8 * alone, abs=4)
    assert len({about["prefix_keys"] for about in explained}) == 1
    if is_exact:
        assert (alone, batch) == (200, 1600)


@pytest.mark.parametrize("has_usage", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_answer_says_of_all_prompts_is_not_taken_for_the_first(stream: bool, has_usage: bool) -> None:
    """A stream's headers come with the first prompt's first token. They name the cached tokens of that prompt, but the
    prompt tokens of all prompts."""
    counted = {headers.CACHED: str(TOKENS), headers.PROMPT_TOKENS: str(8 * TOKENS)}
    usage = usage_event(8 * TOKENS, 16, 8 * TOKENS) if has_usage else event("b")
    engine = ScriptedEngine("a", streams([event("a"), b"data: [DONE]\n\n"]))
    async with running(engine, policy="predicted_ttft") as gateway:
        (pod,) = gateway.app[FLEET].pods("m")
        keys = prefix_keys(PROMPT.encode(), key_seed("m"))
        await gateway.post({"prompt": PROMPT, "stream": True})
        engine.script = (
            streams([event("a"), usage, DONE], extra=counted) if stream else answers(200, usage[6:], extra=counted)
        )
        before = pod.state.cost
        answer = await gateway.post({"prompt": [PROMPT] * 8, "stream": stream})
        held = gateway.app[INDEX].match(keys, asyncio.get_running_loop().time())
        text = (await gateway.get("/metrics")).body.decode()
    assert answer.status == 200
    assert held[PodId("a")].strides == len(keys), "the index forgot what the pod holds"
    assert pod.state.cost == before, "the first prompt's first token came long before the others' prefill was done"
    for kind in ("prompt", "cached"):
        line = f'warmroute_gateway_tokens_total{{kind="{kind}",policy="predicted_ttft"}}'
        assert (f"{line} {8.0 * TOKENS}" in text) == has_usage
