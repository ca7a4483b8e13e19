"""The whole comparison against a scripted gateway on a real socket."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from loadgen.client import ServerUnusable
from loadgen.compare import Comparison, compare
from loadgen.config import CompareSettings
from loadgen.progress import Progress
from tests.loadgen.scripted_gateway import ScriptedGateway

POLICIES = ["round_robin", "affinity_groups", "predicted_ttft"]
FAST = {
    "sessions": 6,
    "session_rate": 200.0,
    "think_s": 0.001,
    "settle_s": 0.0,
    "output_tokens": 2,
    "warmup_requests": 4,
    "system_tokens_min": 200,
    "system_tokens_max": 300,
    "request_timeout_s": 10.0,
}


async def run(gateway: ScriptedGateway, **changes: object) -> tuple[Comparison, str]:
    settings = CompareSettings.model_validate({"url": gateway.url, "policies": POLICIES, **FAST, **changes})
    out = io.StringIO()
    with Progress(Console(file=out, width=200), len(settings.policies)) as progress:
        return await compare(settings, progress), out.getvalue()


def phases(gateway: ScriptedGateway) -> list[tuple[str, str]]:
    """The log without repetitions."""
    return [entry for entry, _ in itertools.groupby(gateway.log)]


def measured_prompts(gateway: ScriptedGateway, policy: str) -> list[list[dict[str, str]]]:
    chats = [entry for entry in gateway.log if entry[0] == "chat"]
    bodies = [body for body, entry in zip(gateway.bodies, chats, strict=True) if entry[1] == policy]
    return [b["messages"] for b in bodies if b["messages"][0]["role"] == "system"]


async def test_arms_run_in_order_with_empty_caches_and_equal_prompts():
    async with ScriptedGateway().running() as gateway:
        comparison, _ = await run(gateway)
    assert [arm.name for arm in comparison.arms] == POLICIES
    first_reset = phases(gateway).index(("reset", ""))
    assert phases(gateway)[:first_reset] == [("chat", policy) for policy in POLICIES]  # checked before any arm
    in_arms = [(("chat", policy), ("reset", ""), ("chat", policy)) for policy in POLICIES]
    assert phases(gateway)[first_reset + 1 :] == list(itertools.chain(*in_arms))
    prompts = [sorted(map(str, measured_prompts(gateway, policy))) for policy in POLICIES]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(set(prompts[0])) == len(prompts[0]) == comparison.arms[0].metrics.planned


async def test_numbers_come_from_the_server_and_from_every_request():
    async with ScriptedGateway(pods=3).running() as gateway:
        comparison, said = await run(gateway)
    assert comparison.tokens_per_word == 2.0
    round_robin, affinity, _ = (arm.metrics for arm in comparison.arms)
    assert round_robin.completed == round_robin.planned == sum(load.requests for load in round_robin.pods.values())
    assert round_robin.failed == round_robin.not_sent == 0
    assert set(round_robin.pods) == {"pod-0", "pod-1", "pod-2"} == set(affinity.pods)
    assert round_robin.request_imbalance == pytest.approx(1.0, abs=0.2)
    assert affinity.cached_token_rate > round_robin.cached_token_rate > 0
    assert "were emptied before each arm" in said
    assert "arm 3/3 predicted_ttft" in said


async def test_a_gateway_that_keeps_its_caches_gets_other_bytes_of_the_same_structure():
    async with ScriptedGateway(allows_reset=False).running() as gateway:
        comparison, said = await run(gateway)
    assert gateway.log.count(("reset", "")) == 1
    assert "HTTP 404 no such endpoint" in said
    assert "other bytes" in comparison.isolation
    systems = {policy: {p[0]["content"] for p in measured_prompts(gateway, policy)} for policy in POLICIES}
    for one, other in itertools.combinations(systems.values(), 2):
        assert not one & other
        assert {text.split("] ")[1] for text in one} == {text.split("] ")[1] for text in other}
        assert {len(text) for text in one} == {len(text) for text in other}


async def test_failures_are_in_the_result():
    def fails_second_turns(body):
        return "http 503" if len(body["messages"]) > 2 else None

    async with ScriptedGateway(fault=fails_second_turns).running() as gateway:
        comparison, said = await run(gateway, turns_min=3, turns_max=3)
    for arm in comparison.arms:
        assert (arm.metrics.completed, arm.metrics.failed, arm.metrics.not_sent) == (6, 6, 6)
        assert arm.metrics.failures == {"http 503": 6}
    assert "6 failed" in said


async def test_a_gateway_that_ignores_the_policy_is_refused_before_any_arm():
    async with ScriptedGateway(allows_policy=False).running() as gateway:
        with pytest.raises(ServerUnusable, match=r"asked for policy round_robin.*used predicted_ttft.*--allow-policy"):
            await run(gateway)
    assert len(gateway.bodies) == 1


async def test_a_server_without_usage_is_refused_unless_told_the_size_of_words():
    async with ScriptedGateway(has_usage=False).running() as gateway:
        with pytest.raises(ServerUnusable, match="--tokens-per-word"):
            await run(gateway)
        comparison, _ = await run(gateway, tokens_per_word=1.5)
    assert comparison.arms[0].metrics.completed > 0


async def test_a_policy_that_fails_is_named():
    async with ScriptedGateway(fault=lambda body: "http 400").running() as gateway:
        with pytest.raises(ServerUnusable, match="policy round_robin failed: http 400"):
            await run(gateway)
