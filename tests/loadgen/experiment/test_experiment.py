"""Whole experiments against scripted gateways on real sockets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from loadgen.commands.compare import CompareSettings, make_plan
from loadgen.experiment.report import result_of
from loadgen.experiment.run import Experiment
from loadgen.load.progress import Silent
from loadgen.load.target import ServerUnusable
from loadgen.result.model import Contrast, Result
from tests.loadgen.experiment.scripted_arms import ArmGateway, measured

TWO = ["round_robin", "predicted_ttft"]
FAST: dict[str, object] = {
    "sessions": 6,
    "session_rate": 200.0,
    "think_s": 0.001,
    "turns": 2,
    "output_tokens": 2,
    "system_tokens": "200-300",
    "request_timeout_s": 30.0,
    "rounds": 2,
}


class Notes(Silent):
    """Keeps the messages for the user."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keep the text."""
        self.lines.append(text)


async def run(gateway: ArmGateway, **changes: object) -> tuple[Result, Experiment]:
    url = {} if "arm" in changes else {"url": gateway.url, "policies": TWO}
    most = changes.pop("max_rounds", 10)
    assert isinstance(most, int)
    settings = CompareSettings.model_validate({**url, **FAST, **changes})
    plan, workload = make_plan(settings)
    plan = replace(plan, settle_s=0.0, warmup_requests=2, stopping=replace(plan.stopping, max_rounds=most))
    experiment = Experiment(plan, Notes())
    await experiment.run()
    return result_of(experiment, settings.configuration(), workload.about(), {}), experiment


def contrast(result: Result, arm: str = "predicted_ttft", metric: str = "ttft_mean_ms") -> Contrast:
    return next(c for c in result.contrasts if (c.arm, c.metric) == (arm, metric))


def phases(gateway: ArmGateway) -> list[tuple[str, str]]:
    """Return the log without repetitions."""
    return [entry for entry, _ in itertools.groupby(gateway.log)]


async def test_blocks_run_abba_from_empty_caches_with_equal_prompts_that_change_by_round() -> None:
    async with ArmGateway().running() as gateway:
        result, experiment = await run(gateway)
    assert result.order == ("round_robin", "predicted_ttft", "predicted_ttft", "round_robin")
    blocks = [
        phase
        for policy in result.order
        for phase in (("chat", policy), ("reset", ""), ("chat", policy))  # warm-up, reset, block
    ]
    merged = [entry for entry, _ in itertools.groupby(blocks)]
    assert phases(gateway)[-len(merged) :] == merged
    assert "emptied before each block" in result.isolation
    asked = [prompt for _, prompt in measured(gateway)]
    per_block = len(asked) // 4
    assert per_block == 12
    prompts = [sorted(map(str, asked[i * per_block : (i + 1) * per_block])) for i in range(4)]
    assert prompts[0] == prompts[1], "each arm gets the same"
    assert prompts[2] == prompts[3]
    assert not set(prompts[0]) & set(prompts[2]), "the next round has other sessions"
    assert all(arm.summary.completed == 24 for arm in result.arms)
    assert all(len(arm.blocks) == 2 for arm in result.arms)
    assert all(len(arm.ttft_cdf_low_ms) == 101 for arm in result.arms)
    assert experiment.stopped == "the 2 rounds asked for"


async def test_the_numbers_are_the_servers_and_both_sources_of_the_hit_rate_agree() -> None:
    async with ArmGateway(pods=3).running() as gateway:
        result, _ = await run(gateway)
    base, arm = (a.summary for a in result.arms)
    assert set(base.pods) == {"pod-0", "pod-1", "pod-2"} == set(arm.pods)
    for summary in (base, arm):
        assert summary.reuse.cached_token_rate is not None
        assert summary.reuse.counters_agree is True
        counted = sum(pod.counted_prompt_tokens or 0 for pod in summary.pods.values())
        assert counted == summary.prompt_tokens
        assert summary.reuse.attainable_rate is not None
        assert summary.reuse.duplicate_prompts == 0
    rate = contrast(result, metric="cached_token_rate")
    assert arm.reuse.cached_token_rate == pytest.approx(rate.ratio.value * (base.reuse.cached_token_rate or 0))
    assert "ttft" in result.definitions
    assert "interval" in result.definitions


async def test_a_gateway_is_administered_at_an_address_of_its_own() -> None:
    async with ArmGateway(lists_pods=False, allows_reset=False).running() as clients, ArmGateway().running() as admin:
        result, _ = await run(clients, admin_url=[admin.url], api_key="clients-key", rounds=1)
        with pytest.raises(ServerUnusable, match=f"--admin-url {clients.url}: {clients.url}/v1/pods answered HTTP 404"):
            await run(clients, admin_url=[clients.url])
    assert "emptied before each block" in result.isolation
    assert {kind for kind, _ in clients.log} == {"chat"}
    assert {kind for kind, _ in admin.log} == {"reset"}
    assert not any("authorization" in sent for sent in admin.admin_headers), "the key is for clients only"


async def test_pods_that_cannot_be_scraped_are_said_aloud_and_claim_nothing() -> None:
    async with ArmGateway(pods=5, scrapable=False).running() as gateway:
        result, _ = await run(gateway, rounds=1)
    (line,) = [
        line for line in result.cautions if line.startswith("The pods' counters do not confirm the hit rate: pod-0: ")
    ]
    assert "answered HTTP 403" in line
    assert line.endswith("; and 2 more.")
    assert all(arm.summary.reuse.counters_agree is None for arm in result.arms)


async def test_counters_that_disagree_are_explained() -> None:
    async with ArmGateway(counters_differ_by=1).running() as gateway:
        result, _ = await run(gateway)
    assert result.arms[0].summary.reuse.counters_agree is False
    (line, *_) = [line for line in result.cautions if "the pods' counters" in line]
    assert "both saw the same prompt tokens" in line
    assert line.endswith("The verdict is based on usage.")


@pytest.mark.parametrize(("delays", "judgement"), [((0.6, 0.1), "better"), ((0.1, 0.6), "worse")])
async def test_what_is_truly_faster_or_slower_is_found(delays: tuple[float, float], judgement: str) -> None:
    async with ArmGateway(delay_s=dict(zip(TWO, delays, strict=True))).running() as gateway:
        result, _ = await run(gateway, sessions=4, turns=1)
    found = contrast(result)
    # A machine that stalls in one block widens the interval, so the judgement may stay open; it is never reversed.
    assert found.judgement in (judgement, "not distinguishable")
    assert (found.ratio.value < 1) == (judgement == "better")
    if found.judgement == judgement:
        by_words = {"better": "predicted_ttft won: mean TTFT ", "worse": "predicted_ttft: worse than round_robin"}
        assert any(line.startswith(by_words[judgement]) for line in result.verdict)


async def test_an_arm_against_itself() -> None:
    """How close the ratio is to 1 depends on the machine; `test_contrasts.py` bounds what noise may claim."""
    async with ArmGateway(delay_s={"": 0.3}).running() as gateway:
        result, _ = await run(gateway, arm=[f"a={gateway.url}", f"b={gateway.url}"], sessions=4)
    found = contrast(result, "b")
    assert 0.2 < found.ratio.value < 5
    same = contrast(result, "b", "cached_token_rate")
    assert same.ratio.value == pytest.approx(1.0, abs=0.2)
    is_silent = any(line.startswith("No arm was distinguishably faster than a") for line in result.verdict)
    assert is_silent == (found.judgement != "better")


async def test_a_fast_arm_that_fails_is_no_winner() -> None:
    gateway = ArmGateway(delay_s={"round_robin": 0.2}, failing=("predicted_ttft",))
    async with gateway.running():
        result, _ = await run(gateway, sessions=12)
    arm = result.arms[1].summary
    assert 0 < arm.failed < arm.planned
    assert set(arm.failures) == {"http 503"}
    assert not any(line.startswith("predicted_ttft won") for line in result.verdict)
    cut = f"predicted_ttft failed {arm.failed} (http 503)"
    assert any(line.startswith(f"Not every request completed: {cut}") for line in result.cautions)
    assert not any(c.metric == "ttft_p99_ms" for c in result.contrasts), "it is infinite in one of the arms"


async def test_two_deployments_are_arms_and_their_pods_are_reset_by_address() -> None:
    service = ArmGateway(lists_pods=False)
    async with service.running() as slow, ArmGateway().running() as fast:
        result, experiment = await run(
            slow,
            arm=[f"service={slow.url}", f"ours={fast.url};affinity_groups"],
            metrics_urls=[f"service={slow.url}/pod/{i}/metrics" for i in range(4)],
            rounds=1,
            sessions=4,
        )
    assert [(arm.name, arm.url, arm.policy) for arm in result.arms] == [
        ("service", slow.url, ""),
        ("ours", fast.url, "affinity_groups"),
    ]
    assert result.baseline == "service"
    assert [arm.summary.completed for arm in result.arms] == [8, 8]
    assert {policy for policy, _ in measured(fast)} == {"affinity_groups"}
    assert experiment.isolation is not None
    assert experiment.isolation.refused is None
    assert ("reset", "") in slow.log
    service_pods = {name: pod for name, pod in result.arms[0].summary.pods.items() if pod.counted_prompt_tokens}
    assert sum(pod.counted_prompt_tokens or 0 for pod in service_pods.values()) == result.arms[0].summary.prompt_tokens
    assert result.arms[0].summary.reuse.counters_agree is True


async def test_an_arm_is_not_charged_with_the_pods_of_another_deployment() -> None:
    async with ArmGateway(pods=2).running() as small, ArmGateway(pods=3).running() as large:
        result, _ = await run(small, arm=[f"small={small.url}", f"large={large.url}"], rounds=1, sessions=4)
    assert [len(arm.summary.pods) for arm in result.arms] == [2, 3]


async def test_a_service_whose_pods_nobody_names_is_not_reset_but_salted() -> None:
    """A reset would reach only one of its pods."""
    async with ArmGateway(lists_pods=False).running() as gateway:
        result, _ = await run(gateway)
    assert ("reset", "") not in gateway.log
    assert "--metrics-urls the pods" in result.isolation


async def test_if_the_reset_is_refused_prompts_differ_in_bytes_and_not_in_structure() -> None:
    async with ArmGateway(allows_reset=False).running() as gateway:
        result, _ = await run(gateway)
    assert "HTTP 404 no such endpoint" in result.isolation
    asked = measured(gateway)
    per_block = len(asked) // 4
    blocks = [[str(prompt[0]["content"]) for _, prompt in asked[i * per_block :][:per_block]] for i in range(4)]
    for one, other in itertools.combinations(blocks, 2):
        assert not {text[:25] for text in one} & {text[:25] for text in other}
    for one, other in ((blocks[0], blocks[1]), (blocks[2], blocks[3])):
        assert sorted(text.split("] ", 1)[1] for text in one) == sorted(text.split("] ", 1)[1] for text in other)
        assert sorted(map(len, one)) == sorted(map(len, other))
        assert len(set(one)) == len(set(other)), "the shared text is still shared"


async def test_rounds_are_added_until_the_interval_is_narrow() -> None:
    async with ArmGateway(delay_s=dict.fromkeys(TWO, 0.02)).running() as gateway:
        result, experiment = await run(gateway, rounds=None, precision=1e12, max_rounds=8)
    assert len(experiment.rounds) == 2
    assert "--precision" in result.facts["rounds"]
    async with ArmGateway().running() as gateway:
        _, experiment = await run(gateway, rounds=None, precision=1e-9, max_rounds=3)
    assert (len(experiment.rounds), experiment.stopped) == (3, "3 rounds, the most that --precision may take")
    async with ArmGateway().running() as gateway:
        result, experiment = await run(gateway, rounds=None, max_time=1e-3)
    assert len(experiment.rounds) == 1
    assert any(line.startswith("There was one round") for line in result.cautions)


async def test_a_gateway_that_does_not_answer_ends_the_experiment() -> None:
    def fails(body: dict[str, Any]) -> str | None:
        return "http 503" if body["messages"][0]["role"] == "system" else None

    async with ArmGateway(fault=fails).running() as gateway:
        result, experiment = await run(gateway, rounds=8)
    assert len(experiment.rounds) == 1
    assert experiment.stopped == "no request of the last round completed in any arm"
    assert [arm.summary.validity.valid for arm in result.arms] == [False, False]
    assert result.verdict[0] == "INVALID: in round_robin no request completed; in predicted_ttft no request completed."


async def test_several_workers_play_the_same_block() -> None:
    async with ArmGateway().running() as gateway:
        result, _ = await run(gateway, workers=2, rounds=1)
    asked = measured(gateway)
    prompts = [sorted(str(prompt) for policy, prompt in asked if policy == name) for name in TWO]
    assert prompts[0] == prompts[1]
    assert [arm.summary.completed for arm in result.arms] == [12, 12]


async def test_an_unknown_policy_is_refused_before_any_block() -> None:
    async with ArmGateway().running() as gateway:
        with pytest.raises(ServerUnusable, match=r"policy fastest failed: http 400.*known: round_robin"):
            await run(gateway, policies=["round_robin", "fastest"])
    assert not measured(gateway)


async def test_a_gateway_that_ignores_the_policy_is_refused() -> None:
    async with ArmGateway(allows_policy=False).running() as gateway:
        with pytest.raises(ServerUnusable, match=r"asked for policy round_robin.*used predicted_ttft.*--allow-policy"):
            await run(gateway)


async def test_a_server_without_usage_is_refused_unless_told_the_size_of_words() -> None:
    async with ArmGateway(has_usage=False).running() as gateway:
        with pytest.raises(ServerUnusable, match="--tokens-per-word"):
            await run(gateway)
        result, _ = await run(gateway, tokens_per_word=1.5, rounds=1)
    assert result.arms[0].summary.reuse.cached_token_rate is None
    assert any("carry no usage" in line for line in result.cautions)


async def test_arms_of_different_models_are_refused() -> None:
    async with ArmGateway(model="one").running() as one, ArmGateway(model="two").running() as two:
        with pytest.raises(ServerUnusable, match=r"a serves one, b serves two.*--model"):
            await run(one, arm=[f"a={one.url}", f"b={two.url}"])


async def test_nobody_there() -> None:
    with pytest.raises(ServerUnusable, match=r"127\.0\.0\.1:1"):
        await run(ArmGateway(url="http://127.0.0.1:1"))
