"""The table of the pods' free tokens is kept current: it always equals what each pod's estimate says."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.contract.events import Keys
from engine.contract.keys import PrefixKey
from router.registry.cache_estimate import Taken
from router.registry.free_tokens import FreeTokens
from router.registry.index import PrefixIndex
from router.views.pod_state import PodState
from router.views.table import PodTable
from router.views.types import PodId

PODS = [PodId("a"), PodId("b"), PodId("c")]
POD = st.sampled_from(PODS)
KEYS = st.tuples(st.integers(0, 3), st.integers(1, 6)).map(
    lambda prompt: tuple(PrefixKey(prompt[0] * 100 + i + 1) for i in range(prompt[1]))
)


class RoomsAgainstEstimates(RuleBasedStateMachine):
    """Applies all changes to what is believed about pods. One table is made late, and one has only two pods."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(speculative_limit=12)
        self.now_s = 0.0
        self.table = PodTable((pod, PodState()) for pod in PODS[1:])
        self.index.free_tokens.watch(self.table.set_free_tokens)

    @rule(pod=POD, keys=KEYS, loose=st.integers(0, 90), capacity=st.sampled_from([None, 300, 500, 900]))
    def ask(self, pod: PodId, keys: Keys, loose: int, capacity: int | None) -> None:
        taken = Taken(len(keys) * 64 + loose, 64.0, capacity, 16)
        self.index.speculate(pod, keys, self.now_s, 4.0, taken)

    @rule(pod=POD, keys=KEYS)
    def use(self, pod: PodId, keys: Keys) -> None:
        self.index.speculate(pod, keys, self.now_s, 4.0)

    @rule(pod=POD, keys=KEYS, held=st.integers(0, 5))
    def refute(self, pod: PodId, keys: Keys, held: int) -> None:
        self.index.refute(pod, keys, held, self.now_s)

    @rule(pod=POD, keys=KEYS, held=st.integers(0, 5))
    def was_held(self, pod: PodId, keys: Keys, held: int) -> None:
        self.index.was_held(pod, keys, held, 70.0)

    @rule(pod=POD, keys=KEYS)
    def retract(self, pod: PodId, keys: Keys) -> None:
        self.index.retract(pod, keys)

    @rule(pod=POD, keys=KEYS)
    def forget_unused(self, pod: PodId, keys: Keys) -> None:
        self.index.forget_unused(pod, keys, self.now_s)

    @rule(pod=POD, keys=KEYS)
    def assume(self, pod: PodId, keys: Keys) -> None:
        self.index.assume(pod, [(self.now_s - 1.0, keys)], self.now_s, 4.0)

    @rule(pod=POD, keys=KEYS)
    def report(self, pod: PodId, keys: Keys) -> None:
        self.index.apply(pod, (), (keys, (), ()))

    @rule(pod=POD, before_s=st.sampled_from([0.0, 1.0]))
    def forget(self, pod: PodId, before_s: float) -> None:
        self.index.forget_until(pod, self.now_s - before_s)

    @rule(pod=POD)
    def drop(self, pod: PodId) -> None:
        self.index.drop(pod)

    @rule(seconds=st.sampled_from([0.5, 3.0]), keys=KEYS)
    def wait(self, seconds: float, keys: Keys) -> None:
        self.now_s += seconds
        self.index.match(keys, self.now_s)

    @invariant()
    def all_say_the_same(self) -> None:
        late = PodTable((pod, PodState()) for pod in PODS)
        self.index.free_tokens.watch(late.set_free_tokens)
        self.index.free_tokens.unwatch(late.set_free_tokens)
        for pod, tokens in zip(PODS, late.free_tokens.tolist(), strict=True):
            speculation = self.index._speculative.get(pod)
            expected = math.inf if speculation is None else speculation.free_tokens()
            assert self.index.free_tokens.of(pod) == tokens == expected
        assert self.table.free_tokens.tolist() == late.free_tokens.tolist()[1:]


RoomsAgainstEstimates.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRoomsAgainstEstimates = RoomsAgainstEstimates.TestCase


def test_a_watcher_that_has_left_hears_nothing() -> None:
    free_tokens, heard = FreeTokens(), list[tuple[PodId, float]]()

    def watcher(pod: PodId, tokens: float) -> None:
        heard.append((pod, tokens))

    free_tokens.watch(watcher)
    free_tokens.set(PODS[0], 5.0)
    free_tokens.set(PODS[0], 5.0)
    free_tokens.unwatch(watcher)
    free_tokens.set(PODS[0], 6.0)
    assert heard == [(PODS[0], 5.0)], "a watcher is told of each change once"
