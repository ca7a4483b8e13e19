"""Engines that leave `cached_tokens` out of an answer if nothing was reused, as vLLM and SGLang do."""

from __future__ import annotations

import asyncio
import re

import orjson
import pytest

from engine.contract.keys import key_seed, prefix_keys
from router.engines.stream_reader import StreamReader
from router.engines.usage import Usage, whole_usage
from router.registry import speculative_entries
from router.startup.parts import FLEET, INDEX
from tests.router.rig.helpers import (
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    dies_after,
    event,
    eventually,
    running,
    streams,
    usage_event,
)

DONE = b"data: [DONE]\n\n"
HIT, MISS, LEFT_OUT = (usage_event(500, 7, cached) for cached in (400, 0, None))
RUNNING_COUNT = b'data: {"choices": [{"text": "b"}], "usage": {"prompt_tokens": 500, "completion_tokens": 2}}\n\n'
ERROR, REFUSAL = (b'data: {"error": {"message": "aborted", "code": %d}}\n\n' % code for code in (500, 400))
OLD, NEW = "old " * 600, "new " * 600


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway believe that a pod has computed a prompt as soon as the prompt is sent."""
    monkeypatch.setattr(speculative_entries, "SETTLED_S", 0.0)


def says(usage: bytes, *, stream: bool) -> Script:
    """Return an answer with this usage."""
    return streams([event("a"), usage, DONE]) if stream else answers(200, usage.removeprefix(b"data: "))


async def learnt(gateway: Gateway) -> tuple[dict[str, float], bool]:
    """Return counted tokens by kind, and whether the pod is still believed to hold OLD."""
    text = (await gateway.get("/metrics")).body.decode()
    counted = re.findall(r'gateway_tokens_total{kind="(prompt|cached)",policy="cache_aware"} (\S+)', text)
    keys = prefix_keys(OLD.encode(), key_seed("m"))
    held = gateway.app[INDEX].match(keys, asyncio.get_running_loop().time())
    return {kind: float(tokens) for kind, tokens in counted}, bool(held)


async def after(script: Script, *, stream: bool = True, is_telling: bool = True) -> tuple[dict[str, float], bool]:
    """Return what is learnt if the pod computed OLD, then NEW, and plays `script` for NEW once more."""
    engine = ScriptedEngine(None, streams([event("a"), DONE]))
    async with running(engine, policy="cache_aware") as gateway:
        for prompt in (OLD, NEW):
            await gateway.post({"model": "m", "prompt": prompt, "stream": True})
        if is_telling:
            engine.script = says(HIT, stream=stream)
            await gateway.post({"model": "m", "prompt": NEW, "stream": stream})
        engine.script = script
        await gateway.post({"model": "m", "prompt": NEW, "stream": stream})
        return await learnt(gateway)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("usage", [MISS, LEFT_OUT], ids=["told", "left out"])
async def test_a_count_that_a_telling_pod_leaves_out_is_a_miss(usage: bytes, stream: bool) -> None:
    """The count is taken as 0, so the pod is no longer believed to hold the prompt, or what LRU evicts before it."""
    assert await after(says(usage, stream=stream), stream=stream) == ({"prompt": 1000.0, "cached": 400.0}, False)


@pytest.mark.parametrize(
    "script",
    [
        dies_after([event("a"), RUNNING_COUNT]),
        dies_after([event("a"), LEFT_OUT[:-30]]),
        streams([event("a"), LEFT_OUT[:-30]]),
        streams([event("a"), RUNNING_COUNT, DONE]),
        streams([event("a"), ERROR, LEFT_OUT, DONE], gap_s=0.02),
        streams([event("a"), REFUSAL, LEFT_OUT, DONE]),
        streams([event("a"), DONE]),
        streams([event("a"), usage_event(0, 0, None), DONE]),
    ],
    ids=["cut", "cut in it", "ends in it", "counts of a running answer", "failed", "refused", "no counts", "none"],
)
async def test_other_answers_without_it_say_nothing(script: Script) -> None:
    assert await after(script) == ({"prompt": 500.0, "cached": 400.0}, True)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_count_of_a_pod_that_never_told_one_stays_unknown(stream: bool) -> None:
    counted, is_held = await after(says(LEFT_OUT, stream=stream), stream=stream, is_telling=False)
    assert (counted.get("prompt", 0.0), is_held) == (0.0, True)


async def test_a_restarted_engine_is_unknown_again() -> None:
    engine = ScriptedEngine("a", streams([event("a"), HIT, DONE]))
    async with running(engine, policy="cache_aware") as gateway:
        await gateway.post({"model": "m", "prompt": NEW, "stream": True})
        engine.epoch, engine.script = 2, streams([event("a"), LEFT_OUT, DONE])
        await eventually(lambda: [pod.epoch for pod in gateway.app[FLEET].pods("m")] == [2])
        await gateway.post({"model": "m", "prompt": NEW, "stream": True})
        counted, _ = await learnt(gateway)
    assert counted == {"prompt": 500.0, "cached": 400.0}


async def test_each_pod_tells_for_itself() -> None:
    async with running(*(ScriptedEngine(name, streams([event("a"), HIT, DONE])) for name in "abcd")) as gateway:
        pods = gateway.app[FLEET].pods("m")
        for told in range(5):
            assert sum(pod.tells_cached_tokens for pod in pods) == told
            await gateway.post({"model": "m", "prompt": NEW, "stream": True})


@pytest.mark.parametrize("size", range(3900, 4200, 7))
def test_a_count_before_the_tail_is_not_taken_to_be_left_out(size: int) -> None:
    """The usage is followed by more of the answer: the gateway sees all of the usage, or knows that it does not."""
    counts = {"prompt_tokens_details": {"cached_tokens": 400}, "completion_tokens": 7, "prompt_tokens": 500}
    body = orjson.dumps({"choices": [], "usage": counts, "prompt_token_ids": "x" * size})
    reader = StreamReader("/v1/completions")
    reader.read(event("a") + b"data: " + body + b"\n\n" + DONE)
    for usage in (whole_usage(body), reader.usage()):
        assert usage == Usage(500, 7, 400, is_final=True) or not usage.is_final
