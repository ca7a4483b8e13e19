"""The index against a model of plain sets, under any order of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.contract.events import Keys, Tier
from engine.contract.keys import PrefixKey, prefix_keys
from router.registry.index import Match, PrefixIndex
from router.views.types import PodId

PODS = st.sampled_from([PodId(f"pod-{i}") for i in range(4)])
STRIDE = 2
LIMIT = 12


def chain(text: bytes) -> Keys:
    return prefix_keys(text, 0, STRIDE)


CHAINS = st.text(alphabet="ab", max_size=10).map(lambda text: chain(text.encode()))
KEYS = st.lists(CHAINS, max_size=2).map(lambda chains: tuple(key for keys in chains for key in keys))
STORED = st.tuples(KEYS, KEYS, KEYS)


class IndexAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(speculative_limit=LIMIT)
        self.now_s = 0.0
        self.asked: Keys = ()
        self.reported: dict[PodId, dict[PrefixKey, Tier]] = {}
        self.speculated: dict[PodId, dict[PrefixKey, tuple[float, int]]] = {}
        """Pod -> key -> (expires at, requests that used it), oldest use first."""

    def guesses(self, pod: PodId) -> dict[PrefixKey, tuple[float, int]]:
        guesses = self.speculated.setdefault(pod, {})
        for key in [key for key, (expires_at_s, _) in guesses.items() if expires_at_s <= self.now_s]:
            del guesses[key]
        return guesses

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(pod=PODS, removed=KEYS, stored=STORED)
    def apply(self, pod: PodId, removed: Keys, stored: tuple[Keys, Keys, Keys]) -> None:
        self.index.apply(pod, removed, stored)
        held, guesses = self.reported.setdefault(pod, {}), self.guesses(pod)
        for key in removed:
            held.pop(key, None)
            guesses.pop(key, None)
        for tier in Tier:
            for key in stored[tier]:
                held[key] = tier
                guesses.pop(key, None)

    @rule(pod=PODS, stored=STORED)
    def replace(self, pod: PodId, stored: tuple[Keys, Keys, Keys]) -> None:
        self.index.replace(pod, stored)
        self.reported[pod] = {key: tier for tier in Tier for key in stored[tier]}
        self.speculated[pod] = {}

    @rule(pod=PODS)
    def drop(self, pod: PodId) -> None:
        self.index.drop(pod)
        self.reported.pop(pod, None)
        self.speculated.pop(pod, None)

    @rule(pod=PODS, keys=CHAINS)
    def speculate(self, pod: PodId, keys: Keys) -> None:
        self.index.speculate(pod, keys, self.now_s, ttl_s=4.0)
        guesses = self.guesses(pod)
        for key in reversed(keys):
            if key not in self.reported.get(pod, {}):
                guesses[key] = (self.now_s + 4.0, guesses.pop(key, (0.0, 0))[1] + 1)
        while len(guesses) > LIMIT:
            del guesses[next(iter(guesses))]

    @rule(pod=PODS, keys=CHAINS)
    def retract(self, pod: PodId, keys: Keys) -> None:
        self.index.match(keys, self.now_s)
        self.index.retract(pod, keys)
        guesses = self.guesses(pod)
        for key in keys:
            if guesses.get(key, (0.0, 0))[1] == 1:
                del guesses[key]

    @rule(pod=PODS, keys=CHAINS, strides=st.integers(0, 5))
    def refute(self, pod: PodId, keys: Keys, strides: int) -> None:
        self.index.refute(pod, keys, strides, self.now_s)
        for key in keys[strides:]:
            self.guesses(pod).pop(key, None)

    @rule(budget=st.integers(1, 40))
    def sweep(self, budget: int) -> None:
        if self.index.sweep(budget) == 0:
            assert self.index.statistics().retired_slots == 0

    @rule(keys=CHAINS)
    def match(self, keys: Keys) -> None:
        self.asked = keys
        self.match_again()

    @invariant()
    def match_again(self) -> None:
        """Match the last keys again, whatever happened in between."""
        keys = self.asked
        expected = {}
        for pod in {*self.reported, *self.speculated}:
            held, guesses = self.reported.get(pod, {}), self.guesses(pod)
            strides = next((i for i, key in enumerate(keys) if key not in held and key not in guesses), len(keys))
            if strides:
                tiers = [held.get(key, Tier.GPU) for key in keys[:strides]]
                expected[pod] = Match(strides, tiers.count(Tier.HOST), tiers.count(Tier.DISK))
        assert self.index.match(keys, self.now_s) == expected
        pods = {*self.reported, *self.speculated, PodId("stranger")}
        found = {pod: self.index.strides_of(pod, keys, self.now_s) for pod in pods}
        assert found == {pod: expected[pod].strides if pod in expected else 0 for pod in pods}

    @invariant()
    def reports_are_kept(self) -> None:
        for pod, held in self.reported.items():
            assert self.index.held(pod) == {tier: {k for k, t in held.items() if t is tier} for tier in Tier}

    def teardown(self) -> None:
        while self.index.sweep(1000):
            pass
        for pod in list(self.reported):
            assert self.index.held(pod) == {
                tier: {k for k, t in self.reported[pod].items() if t is tier} for tier in Tier
            }
        for pod in {*self.reported, *self.speculated}:
            self.index.drop(pod)
        while self.index.sweep(1000):
            pass
        assert len(self.index) == 0
        assert self.index.statistics().retired_slots == 0


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
