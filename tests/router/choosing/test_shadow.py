"""Shadow policies: they change nothing, agree with themselves, count what happened, and fail no request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.common.settings import ConfigError
from engine.contract import headers
from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from engine.contract.requests import Endpoint
from router.choosing.chooser import Choice, Chooser, Knowledge
from router.choosing.registry_view import NoRegistry
from router.choosing.shadow import Shadows
from router.engines.usage import Usage
from router.fleet.pod import Pod, TrackedRequest
from router.fleet.probe import PodIdentity
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.routing.policies import POLICY_NAMES, make_policy
from router.settings.constants import Constants
from router.settings.gateway import GatewaySettings
from router.startup import handlers as gateway_app
from router.telemetry.metrics import Metrics
from router.telemetry.shadows import ShadowMetrics
from router.views.table import CandidatePods, Policy
from router.views.types import PodId, RequestInfo
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, running
from tests.router.routing.pods import Made, candidates

STRIDE = 256
PODS = 4
FEW = settings(max_examples=40)
"""An example plays up to 40 requests."""
NAMES = pytest.mark.parametrize("name", POLICY_NAMES)


class Registry(NoRegistry):
    expired = False


@dataclass
class Fleet:
    pods_: list[Pod] = field(
        default_factory=lambda: [Pod(f"http://{i}", PodIdentity(PodId(f"pod-{i}"), 1, ())) for i in range(PODS)]
    )

    def pods(self, model: str) -> Sequence[Pod]:
        return self.pods_


class Recorded(ShadowMetrics):
    """Records the counts of shadow policies, in order."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.compared: list[dict[str, Any]] = []

    def chose(self, policy: str, shadow: str, **counted: Any) -> None:
        self.compared.append({"policy": policy, "shadow": shadow, **counted})
        super().chose(policy, shadow, **counted)


@dataclass(frozen=True)
class Step:
    """A request and its outcome."""

    policy: str
    prompt: int
    strides: int
    pause_s: float
    is_retried: bool
    expired: bool
    cached_strides: int | None
    """The count that its answer reports at once. None: the request never ends."""


def steps(*, policies: Sequence[str] = POLICY_NAMES, retries: bool = True) -> st.SearchStrategy[list[Step]]:
    return st.lists(
        st.builds(
            Step,
            policy=st.sampled_from(policies),
            prompt=st.integers(0, 3),
            strides=st.integers(0, 30),
            pause_s=st.floats(0, 1),
            is_retried=st.booleans() if retries else st.just(False),
            expired=st.sampled_from([False, False, False, True]),
            cached_strides=st.one_of(st.none(), st.integers(0, 30)),
        ),
        min_size=1,
        max_size=40,
    )


class World:
    """A chooser over four pods in virtual time."""

    def __init__(self, shadows: Sequence[str]) -> None:
        self.now_s = 0.0
        self.metrics, self.index, self.registry, self.estimates = Metrics(), PrefixIndex(), Registry(), Estimates()
        self.metrics.shadows = self.recorded = Recorded()
        self.fleet = Fleet()
        self.chooser = Chooser(
            Knowledge(self.fleet, self.index, self.registry, self.estimates),
            make_policies,
            self.metrics,
            Constants(stride_bytes=STRIDE),
            clock=lambda: self.now_s,
            shadows=Shadows(shadows, make_policies, self.metrics) if shadows else None,
        )

    def take(self, step: Step, number: int = 0) -> Choice:
        """Play one step, and return the choice that the request followed."""
        self.now_s += step.pause_s
        self.registry.expired = step.expired
        request = inbound(step)
        choice = self.chooser.choose(request)
        if step.is_retried:
            self.chooser.undo(request, choice)
            choice = self.chooser.choose(request, {choice.pod.pod_id})
        tokens = request.prompt_tokens
        tracked = TrackedRequest(
            choice.pod,
            str(number),
            prompt_tokens=tokens,
            uncached_tokens=tokens - choice.cached_tokens,
            output_tokens=10,
            streams=True,
            clock=lambda: self.now_s,
        )
        tracked.__enter__()
        if step.cached_strides is not None:
            self.now_s += 0.05
            cached = min(tokens, 64 * step.cached_strides)
            tracked.first_token(cached)
            tracked.__exit__()
            self.chooser.learn(request, choice, Usage(tokens, 10, cached))
        return choice

    def state(self) -> object:
        """Return all state that decisions rest on, except the policies' own."""
        keys = [chain(prompt, 30) for prompt in range(4)]
        return (
            self.index.statistics(),
            [self.index.match(chain, self.now_s) for chain in keys],
            [pod.state.row(self.now_s) for pod in self.fleet.pods_],
            self.estimates.of("m"),
            {model: shares.export(self.now_s) for model, shares in self.chooser.traffic_shares().items()},
        )


def make_policies() -> Mapping[str, Policy]:
    return {name: make_policy(name) for name in POLICY_NAMES}


def chain(prompt: int, strides: int) -> tuple[PrefixKey, ...]:
    return tuple(PrefixKey(1_000 * prompt + i) for i in range(strides))


def inbound(step: Step) -> Inbound:
    size = STRIDE * step.strides + 50
    return Inbound(
        endpoint=Endpoint.COMPLETIONS,
        model="m",
        stream=True,
        policy=step.policy,
        keys=chain(step.prompt, step.strides),
        prompt_bytes=size,
        prompt_tokens=size // 4,
        tokens_per_stride=STRIDE / 4,
        output_tokens=10,
        teaches_tokens=True,
        body=b"",
    )


@FEW
@given(played=steps())
def test_what_acts_is_bit_equal_with_and_without_shadows(played: list[Step]) -> None:
    plain, shadowed = World(()), World(POLICY_NAMES)
    for number, step in enumerate(played):
        without, with_shadows = plain.take(step, number), shadowed.take(step, number)
        assert (without.pod.pod_id, without.policy, without.decision, without.strides) == (
            with_shadows.pod.pod_id,
            with_shadows.policy,
            with_shadows.decision,
            with_shadows.strides,
        )
        assert plain.state() == shadowed.state()


@NAMES
@FEW
@given(data=st.data())
def test_a_policy_in_the_shadow_of_itself_always_agrees(name: str, data: st.DataObject) -> None:
    """So the shadow sees what the acting policy sees, remembers the same choices, and has the same replacement when the
    registry has expired."""
    played = data.draw(steps(policies=[name], retries=False))
    world = World((name,))
    for number, step in enumerate(played):
        world.take(step, number)
    assert [compared["is_same"] for compared in world.recorded.compared] == [True] * len(played)


@FEW
@given(played=steps(), shadows=st.lists(st.sampled_from(POLICY_NAMES), min_size=1, unique=True))
def test_every_first_decision_is_compared_on_one_scale(played: list[Step], shadows: list[str]) -> None:
    world = World(shadows)
    for number, step in enumerate(played):
        world.take(step, number)
    compared = world.recorded.compared
    assert [c["shadow"] for c in compared] == shadows * len(played)
    for step, c in zip([step for step in played for _ in shadows], compared, strict=True):
        assert c["prompt_tokens"] == inbound(step).prompt_tokens
        assert all(seconds > 0 for seconds in c["ttft_s"])
        if c["is_same"]:
            assert c["cached_tokens"][0] == c["cached_tokens"][1]
            assert c["ttft_s"][0] == c["ttft_s"][1]


@FEW
@given(played=steps(policies=["predicted_ttft"], retries=False))
def test_the_estimate_is_the_one_that_predicted_ttft_acts_by(played: list[Step]) -> None:
    world = World(("round_robin",))
    for number, step in enumerate(played):
        decision = world.take(step, number).decision
        compared = world.recorded.compared[-1]
        assert compared["cached_tokens"][0] == decision.predicted_cached_tokens
        assert compared["ttft_s"][0] == decision.predicted_ttft_s or decision.policy == "bounded_hash"


def test_each_model_has_its_own() -> None:
    """A shadow round robin takes turns within each model."""
    asked: list[str] = []

    class Turns:
        name = "round_robin"

        def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Any:
            decision = self.inner.choose(request, pods)
            asked.append(pods.table.ids[decision.pod])
            return decision

        def __init__(self) -> None:
            self.inner = make_policy("round_robin")

    shadows = Shadows(("round_robin",), lambda: {**make_policies(), "round_robin": Turns()}, Metrics())
    pods = candidates([Made(PodId(name), cost=StepCost(token_s=1e-4)) for name in "ab"])
    request = RequestInfo((), 10, 0.0)
    acting = make_policy("least_loaded").choose(request, pods)
    for model in ("m", "n", "m", "n"):
        shadows.compare(model, acting, request, pods, lambda policy: policy)
    assert asked == ["a", "a", "b", "b"]


async def scrape(gateway: Gateway) -> dict[tuple[str, ...], float]:
    """Return the samples about shadow policies, keyed by name without `warmroute_gateway_shadow_` and label values in
    this order: the acting policy, the shadow policy, the rest."""
    text = (await gateway.get("/metrics")).body.decode()
    prefix = "warmroute_gateway_shadow_"
    order = ["policy", "shadow", "outcome", "kind", "choice", "le"]
    return {
        (
            sample.name.removeprefix(prefix),
            *(sample.labels[label] for label in sorted(sample.labels, key=order.index)),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


async def test_the_metrics_say_what_each_would_have_done() -> None:
    engines = [ScriptedEngine(name, answers(200)) for name in "ab"]
    prompt = {"model": "m", "prompt": "x" * 3072}
    async with running(*engines, shadow_policies=["cache_aware", "prefix_hash"]) as gateway:
        sent = [await gateway.post(prompt) for _ in range(4)]
        size = (await gateway.post(prompt, path="/v1/route/explain")).json["prompt_tokens_estimated"]
        seen = await scrape(gateway)
    assert [answer.pod for answer in sent] == ["a", "b", "a", "b"]
    assert {answer.headers[headers.POLICY] for answer in sent} == {"round_robin"}
    acting = [int(answer.headers[headers.PREDICTED_CACHED]) for answer in sent]
    held = acting[2]
    assert held > 0
    assert acting == [0, 0, held, held]
    # The acting policy sent the second request to a pod without its prefix.
    assert seen["tokens_total", "round_robin", "cache_aware", "acting"] == 2 * held
    assert seen["tokens_total", "round_robin", "cache_aware", "shadow"] == 3 * held
    for shadow in ("cache_aware", "prefix_hash"):
        about = ("round_robin", shadow)
        assert seen["tokens_total", *about, "prompt"] == 4 * size
        assert seen["decisions_total", *about, "same"] + seen["decisions_total", *about, "other"] == 4
        assert seen["ttft_seconds_count", *about, "acting"] == seen["ttft_seconds_count", *about, "shadow"] == 4
    # One prompt has one owner: round robin chooses it every other time.
    assert seen["decisions_total", "round_robin", "prefix_hash", "same"] == 2
    sums = [seen["ttft_seconds_sum", "round_robin", "cache_aware", choice] for choice in ("acting", "shadow")]
    assert sums[1] < sums[0]
    assert seen["seconds_count",] == 4


async def test_a_retry_is_no_further_request() -> None:
    engines = [ScriptedEngine("a", answers(503)), ScriptedEngine("b", answers(200))]
    async with running(*engines, shadow_policies=["least_loaded"]) as gateway:
        sent = [await gateway.post({"prompt": "x"}) for _ in range(3)]
        seen = await scrape(gateway)
    assert [answer.pod for answer in sent] == ["b"] * 3
    assert engines[0].received, "nothing was retried"
    assert sum(value for (name, *_), value in seen.items() if name == "decisions_total") == 3


async def test_a_policy_by_header_is_what_acted() -> None:
    async with running(
        ScriptedEngine("a", answers(200)), shadow_policies=["least_loaded"], allow_policy_header=True
    ) as gateway:
        await gateway.post({"prompt": "x"}, **{headers.POLICY: "prefix_hash"})
        await gateway.post({"prompt": "x"}, **{headers.POLICY: "least_loaded"})
        seen = await scrape(gateway)
    counted = {labels[1:]: value for labels, value in seen.items() if labels[0] == "decisions_total"}
    assert counted == {
        ("prefix_hash", "least_loaded", "same"): 1,
        ("prefix_hash", "least_loaded", "other"): 0,
        ("least_loaded", "least_loaded", "same"): 1,
        ("least_loaded", "least_loaded", "other"): 0,
    }


class Broken:
    """Fails every call."""

    name = "cache_aware"

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Any:
        raise ZeroDivisionError("a broken policy")


async def test_a_failing_shadow_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(name: str, options: Any) -> Policy:
        return Broken() if name == "cache_aware" else make_policy(name, options)

    monkeypatch.setattr(gateway_app, "make_policy", make)
    engines = [ScriptedEngine(name, answers(200)) for name in "ab"]
    with caplog.at_level(logging.ERROR):
        async with running(*engines, shadow_policies=["cache_aware", "least_loaded"]) as gateway:
            sent = [await gateway.post({"prompt": "x" * 1000}) for _ in range(3)]
            seen = await scrape(gateway)
    assert [(answer.status, answer.pod) for answer in sent] == [(200, "a"), (200, "b"), (200, "a")]
    assert seen["decisions_total", "round_robin", "cache_aware", "failed"] == 3
    assert seen["tokens_total", "round_robin", "least_loaded", "prompt"] > 0
    assert ("tokens_total", "round_robin", "cache_aware", "prompt") not in seen
    assert caplog.text.count("shadow policy cache_aware failed") == 1
    assert "a broken policy" in caplog.text


async def test_without_them_nothing_is_asked() -> None:
    async with running(ScriptedEngine("a", answers(200))) as gateway:
        await gateway.post({"prompt": "x"})
        seen = await scrape(gateway)
    assert not any(seen.values())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--shadow-policies cache_aware,best", "--shadow-policies: got 'best'; Input should be 'round_robin'"),
        ("--shadow-policies cache_aware,round_robin,cache_aware", "cache_aware is listed twice: once is enough"),
        ("--policy round_robin --shadow-policies round_robin", "--shadow-policies has round_robin, which is the --pol"),
        ("--shadow-policies cache_aware,predicted_ttft", "leave it out, or choose another"),
    ],
)
def test_bad_ones_are_refused_by_name(flags: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GatewaySettings.load(["--engines", "http://a", *flags.split()], prog="warmroute-gateway", environ={})
    assert named in str(refused.value)


def test_they_are_read_from_flag_and_environment() -> None:
    want = ["cache_aware", "round_robin"]
    engines = ["--engines", "http://a"]
    by_flag = GatewaySettings.load([*engines, "--shadow-policies", ",".join(want)], prog="g", environ={})
    variable = {"WARMROUTE_SHADOW_POLICIES": ", ".join(want)}
    by_variable = GatewaySettings.load(engines, prog="g", environ=variable)
    assert by_flag.shadow_policies == by_variable.shadow_policies == want
    assert GatewaySettings.load(engines, prog="g", environ={}).shadow_policies == []
