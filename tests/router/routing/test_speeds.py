"""What answers teach about the speed of pods that do not report it: equal pods stay equal, unlike pods do not."""

from __future__ import annotations

import gc
import math
import random
import statistics

import pytest

from engine.contract.load import LoadReport, StepCost
from router.routing.policies import make_policy
from router.views.latency import ENOUGH_OBSERVATIONS, OBSERVATION_S, PRIOR
from router.views.pod_state import PodState
from router.views.speeds import PodSpeed, SpeedPool, Speeds
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import choose, seen_of

BASE_S, TOKEN_S = 0.02, 3e-4
SAME = math.log(1.5)


class Pods:
    """Two pods. Every tenth of a second, one of them gives an answer, chosen at random."""

    def __init__(self, *, noise: float = 0.0, slower: float = 1.0, seed: int = 1) -> None:
        self.pool = SpeedPool()
        self.speeds = [PodSpeed(self.pool), PodSpeed(self.pool)]
        self.slowness = [1.0, slower]
        self.noise = noise
        self.now_s = 100.0
        self._rng = random.Random(seed)
        self._spells: dict[tuple[int, int], float] = {}

    def answer(self, until_s: float, *, long: float = 0.2, machine: float = 1.0) -> None:
        """Let the pods answer until `until_s`. `long`: share of uncached prompts. `machine`: factor on all times."""
        while self.now_s < until_s:
            self.now_s += 0.1
            pod = self._rng.randrange(2)
            tokens = 1500 if self._rng.random() < long else 40
            # A spell makes a pod slower or faster while it lasts, and each answer varies on top of that.
            spell = self._spells.setdefault((pod, int(self.now_s / 2)), self._rng.gauss(0, self.noise))
            noise = math.exp(spell + self._rng.gauss(0, self.noise))
            seconds = machine * self.slowness[pod] * noise * (BASE_S + TOKEN_S * tokens)
            self.speeds[pod].observe(tokens, seconds, self.now_s)

    @property
    def apart(self) -> float:
        """Return the logarithm of how much slower the second pod seems to be."""
        first, second = self.speeds
        return math.log(second.cost.token_s / first.cost.token_s)


@pytest.mark.parametrize("seed", range(1, 9))
def test_equal_pods_on_a_noisy_machine_stay_equal(seed: int) -> None:
    """In each spell of two seconds a pod has another speed: in a third of the spells it is at least 1.8 times as fast
    or as slow. In addition, a third of its answers vary as much."""
    pods, aparts = Pods(noise=0.6, seed=seed), []
    for until_s in range(105, 220, 5):
        pods.answer(until_s)
        aparts.append(abs(pods.apart))
    assert max(aparts) < math.log(2)
    assert statistics.median(aparts) < SAME / 2
    assert TOKEN_S / 2 < pods.speeds[0].cost.token_s < 2 * TOKEN_S


def test_a_slower_pod_is_learnt_at_once_if_answers_do_not_differ() -> None:
    pods = Pods(slower=3.0)
    pods.answer(110)
    assert pods.apart == pytest.approx(math.log(3), abs=0.5)
    pods.answer(150)
    assert pods.apart == pytest.approx(math.log(3), abs=0.1)


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_slower_pod_is_learnt_later_if_answers_differ(seed: int) -> None:
    pods = Pods(noise=0.5, slower=5.0, seed=seed)
    pods.answer(190)
    assert pods.apart > SAME


def test_what_is_known_of_long_prompts_outlasts_short_ones() -> None:
    """2,000 answers to cached prompts tell nothing about an uncached prompt."""
    pods = Pods()
    pods.answer(120, long=0.5)
    pods.answer(320, long=0.0)
    cost = pods.speeds[0].cost
    assert 1500 * cost.token_s == pytest.approx(1500 * TOKEN_S, rel=0.15)


def test_short_prompts_tell_that_the_machine_is_slower_for_long_ones_too() -> None:
    pods = Pods()
    pods.answer(130, long=0.5)
    pods.answer(150, long=0.0, machine=4.0)
    assert 2 * TOKEN_S < pods.speeds[0].cost.token_s < 5 * TOKEN_S
    assert abs(pods.apart) < 0.1


def test_a_pod_that_joins_begins_with_what_its_like_have_taught() -> None:
    pods = Pods()
    pods.answer(130)
    new = PodSpeed(pods.pool)
    assert new.cost == pods.speeds[0].cost
    assert new.cost.token_s == pytest.approx(TOKEN_S, rel=0.15)
    assert not new.is_known(pods.now_s)
    new.observe(1500, 0.47, pods.now_s)
    assert new.is_known(pods.now_s)
    assert not new.is_known(pods.now_s + OBSERVATION_S + 1)


def test_the_mean_of_all_pods_follows_what_answers_say_now() -> None:
    """Answers of ten minutes ago have no weight, however many they were."""
    pool = SpeedPool()
    for number in range(100):
        pool.mean_with(1.0, 1.0, float(number))
    assert pool.mean_with(-1.0, 1.0, 700.0) == pytest.approx(-1.0, abs=0.01)


def test_few_answers_are_of_no_known_speed() -> None:
    speed = PodSpeed(SpeedPool())
    for i in range(ENOUGH_OBSERVATIONS - 1):
        speed.observe(1500, 0.5, i)
        assert not speed.is_known(i)
    speed.observe(1500, 0.5, 20.0)
    assert speed.is_known(20.0)


def test_own_constants_count_for_more_than_any_answers() -> None:
    pods = Pods()
    cost = StepCost(base_s=0.004, token_s=2e-5)
    pods.speeds[0].report(cost)
    pods.answer(120)
    assert pods.speeds[0].cost is cost
    assert (pods.speeds[0].overhead_s, pods.speeds[0].spread) == (0.0, 0.0)
    assert pods.speeds[1].cost.token_s == pytest.approx(TOKEN_S, rel=0.15), "one pod's report does not count for both"


def test_the_pods_of_a_pool_hear_when_its_constants_change() -> None:
    pool = SpeedPool()
    states = [PodState(pool) for _ in range(3)]
    changed: set[PodState] = set()
    for state in states:
        state.watch(changed)
    now_s = 0.0
    for i in range(20):
        states[0].sent(str(i), prompt_tokens=1500, uncached_tokens=1500, output_tokens=4, now_s=now_s)
        now_s += 1.0
        states[0].first_token(str(i), now_s=now_s)
        states[0].finished(str(i), now_s=now_s)
    assert {state.cost for state in states} == {states[0].cost}
    assert states[0].cost.token_s > 4 * PRIOR.token_s
    assert changed == set(states)


def taught() -> tuple[PodState, float]:
    """Return a pod whose requests have a fixed part of half a second, and the time."""
    state, now_s = PodState(), 0.0
    for i in range(60):
        tokens = 1500 if i % 3 == 0 else 40
        state.sent(str(i), prompt_tokens=1500, uncached_tokens=tokens, output_tokens=4, now_s=now_s)
        now_s += 0.5 + TOKEN_S * tokens
        state.first_token(str(i), now_s=now_s)
        state.finished(str(i), now_s=now_s)
    return state, now_s


def test_nobody_waits_for_the_fixed_time_of_others() -> None:
    state, now_s = taught()
    idle = seen_of(state, now_s)
    assert idle.overhead_s == pytest.approx(0.5, rel=0.1)
    state.sent("a", prompt_tokens=1500, uncached_tokens=100, output_tokens=4, now_s=now_s)
    busy = seen_of(state, now_s)
    request = RequestInfo((), 1500, now_s)
    policy = make_policy("predicted_ttft")
    alone_s, behind_s = (choose(policy, request, [view]).predicted_ttft_s for view in (idle, busy))
    assert alone_s is not None
    assert behind_s is not None
    assert alone_s == pytest.approx(0.5 + 1500 * TOKEN_S, rel=0.1)
    assert behind_s - alone_s == pytest.approx(100 * TOKEN_S, rel=0.2)


def test_an_answer_is_late_when_noise_does_not_explain_it() -> None:
    """The request is predicted to take half a second. Only more than the usual noise makes the pod look stuck."""
    pool = SpeedPool()
    for deviation in [1.0, -1.0] * 100:
        pool.saw_noise(deviation)
    state = PodState(pool)
    state.sent("a", prompt_tokens=5000, uncached_tokens=5000, output_tokens=4, now_s=0.0)
    assert pool.spread == pytest.approx(math.e - 1, rel=0.05)
    waits_s = [seen_of(state, now_s).free_at_s - now_s for now_s in (1.0, 1.2, 3.0, 30.0)]
    assert max(waits_s[:2]) <= 0
    assert waits_s[2:] == pytest.approx([1.6, 28.6], abs=0.3)


def test_pools_are_by_model_and_engine_and_end_with_their_pods() -> None:
    speeds = Speeds()
    first = PodState(speeds.of("a", "vllm"))
    assert speeds.of("a", "vllm") is speeds.of("a", "vllm")
    assert speeds.of("a", "vllm") is not speeds.of("a", "sglang")
    first.report(LoadReport(cost=StepCost(token_s=1e-5)), now_s=0.0)
    del first
    gc.collect()
    assert not list(speeds._pools)


@pytest.mark.parametrize("computed", [1500, 40])
def test_an_answer_teaches_by_what_was_computed_not_by_what_was_believed(computed: int) -> None:
    """vLLM reports at the end of an answer what it reused. Half of the prompts were believed cached, but in fact all or
    none of them were."""
    state, now_s = PodState(), 0.0
    for i in range(60):
        believed = 40 if i % 2 else 1500
        state.sent(str(i), prompt_tokens=1500, uncached_tokens=believed, output_tokens=4, now_s=now_s)
        now_s += 0.01 + TOKEN_S * computed
        state.first_token(str(i), now_s=now_s)
        state.finished(str(i), now_s=now_s + 0.01, uncached_tokens=computed)
        now_s += 0.02
    expected_s = 0.01 + TOKEN_S * computed
    learnt_s = seen_of(state, now_s).overhead_s + state.cost.token_s * computed
    assert learnt_s == pytest.approx(expected_s, rel=0.1)


def test_a_pool_that_begins_with_what_another_learnt_goes_on_as_that_one() -> None:
    """A new gateway predicts what the earlier gateway would predict, even for a pod that is slower than the others."""
    old = Pods(noise=0.3, slower=4.0, seed=2)
    old.answer(190)
    speeds, names = Speeds(), [PodId("a"), PodId("b")]
    learnt, factors = old.pool.learnt, [speed.learnt for speed in old.speeds]
    assert learnt is not None
    speeds.expect("m", {"vllm": learnt}, {name: of for name, of in zip(names, factors, strict=True) if of is not None})
    pool = speeds.of("m", "vllm")
    assert (pool.learnt, pool.observations) == (learnt, old.pool.observations)
    pods = [PodSpeed(pool) for _ in names]
    for name, pod in zip(names, pods, strict=True):
        factor = speeds.factor_of(name)
        assert factor is not None
        pod.begin_with(factor)
    # Pods get the pool's new constants only when these have changed by 5 %.
    assert [pod.cost.token_s for pod in pods] == pytest.approx([each.cost.token_s for each in old.speeds], rel=0.06)
    assert [pod.overhead_s for pod in pods] == pytest.approx([each.overhead_s for each in old.speeds], rel=0.06)
    assert not pods[0].is_known(190.0)  # not before this gateway has seen an answer: the machine may be busier
    pods[0].observe(1500, BASE_S + 1500 * TOKEN_S, 190.0)
    assert pods[0].is_known(190.0)
    again = speeds.of("m", "vllm")
    assert again is pool
    assert speeds.of("m", "sglang").learnt is None
    assert speeds.factor_of(names[0]) is None


def test_too_few_answers_are_not_told() -> None:
    pods = Pods()
    pods.answer(100 + (ENOUGH_OBSERVATIONS - 1) / 10 - 0.05)
    assert 0 < pods.pool.observations < ENOUGH_OBSERVATIONS
    assert pods.pool.learnt is None


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_prompt_that_is_cached_whole_teaches_whatever_the_fit_is(is_synced: bool) -> None:
    """If times grow faster than prompts, the line through them expects no time at all of no tokens."""
    state, now_s = PodState(), 0.0

    def serve(tokens: int, seconds: float, cached_tokens: int | None, uncached_tokens: int) -> None:
        nonlocal now_s
        now_s += 1000.0
        state.sent("r", prompt_tokens=tokens, uncached_tokens=uncached_tokens, output_tokens=1, now_s=now_s)
        state.first_token("r", now_s=now_s + seconds, cached_tokens=cached_tokens)
        state.finished("r", now_s=now_s + seconds + 1.0)

    for _ in range(60):
        for tokens, seconds in ((500, 0.02), (1000, 0.06), (8000, 4.0)):
            serve(tokens, seconds, 0, tokens)
    assert state.speed.overhead_s == 0.0
    for _ in range(60):
        serve(1000, 0.01, 1000 if is_synced else None, 0)
    assert not state._decoding
    assert not state._pending
    assert state._context_tokens == 0
    assert 0 <= state.speed.overhead_s < 1.0
    assert 0 < state.cost.token_s < 0.01
