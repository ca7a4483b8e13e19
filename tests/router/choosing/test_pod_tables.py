"""Tables of pods in the gateway: kept ones decide as new ones, while pods come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser, Knowledge
from router.choosing.pod_tables import Tables
from router.choosing.registry_view import NoRegistry
from router.fleet.facts import EngineFacts
from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity, ServedModel
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.cache_estimate import Taken
from router.registry.free_tokens import FreeTokens
from router.registry.index import PrefixIndex
from router.routing.policies import POLICY_NAMES, make_policy
from router.settings.constants import CONSTANTS
from router.telemetry.metrics import Metrics
from router.views.types import PodId

PODS = 40
POLICY = "predicted_ttft"


class World:
    """Pods that come and go, and a chooser."""

    def __init__(self, *, anew: bool = False) -> None:
        """`anew`: its tables are made anew for each question."""
        self._anew = anew
        self.listed: list[Pod] = [new_pod(i) for i in range(PODS)]
        self.now_s = 0.0
        self.index = PrefixIndex()
        self.chooser = Chooser(
            Knowledge(self, self.index, NoRegistry(), Estimates()),
            lambda: {name: make_policy(name) for name in POLICY_NAMES},
            Metrics(),
            CONSTANTS,
            clock=lambda: self.now_s,
        )

    def pods(self, model: str) -> Sequence[Pod]:
        return self.listed

    def ask(self, number: int, policy: str, excluded: Sequence[PodId] = ()) -> tuple[str, int, int]:
        self.now_s = 0.01 * number
        self.forget()
        choice = self.chooser.choose(replace(self.inbound(number), policy=policy), excluded)
        choice.pod.state.sent(str(number), prompt_tokens=500, uncached_tokens=500, output_tokens=100, now_s=self.now_s)
        if number >= 60:
            for pod in self.listed:
                pod.state.first_token(str(number - 30), now_s=self.now_s)
                pod.state.finished(str(number - 60), now_s=self.now_s)
        return choice.pod.pod_id, choice.strides, choice.cached_tokens

    def forget(self) -> None:
        if self._anew:
            self.chooser._tables.drop("m")

    def inbound(self, number: int) -> Inbound:
        keys = (*(PrefixKey(number % 3 * 100 + i + 1) for i in range(6)), PrefixKey(10_000 + number))
        return Inbound(
            Endpoint.COMPLETIONS,
            "m",
            True,
            POLICY,
            keys,
            2000,
            500,
            64.0,
            100,
            teaches_tokens=True,
            body=b"",
        )

    def patience_s(self, number: int, without_room: frozenset[PodId]) -> float:
        """Compute the patience pod by pod."""
        inbound = self.inbound(number)
        held = {pod.pod_id: 0 for pod in self.listed}
        for pod_id, match in self.index.match(inbound.keys, self.now_s).items():
            if pod_id in held:
                held[pod_id] = match.strides
        there = max((strides for pod_id, strides in held.items() if pod_id in without_room), default=0)
        elsewhere = max(strides for pod_id, strides in held.items() if pod_id not in without_room)
        token_s = min(pod.state.cost.token_s for pod in self.listed if pod.pod_id not in without_room)
        return max(0, there - elsewhere) * inbound.tokens_per_stride * token_s


def new_pod(number: int) -> Pod:
    return Pod("http://pod", PodIdentity(PodId(f"pod-{number:03}"), 1, ()))


def new_foreign_pod(number: int) -> Pod:
    """Return a pod that publishes nothing; one in three reports no capacity."""
    pod = Pod("http://pod", PodIdentity(PodId(f"pod-{number:03}"), 1, (ServedModel("m", b"{}"),)))
    if number % 3:
        pod.facts = EngineFacts("vllm", None, 1000 + 100 * (number % 5), 16)
    return pod


def test_kept_tables_serve_as_new_ones_while_pods_come_and_go() -> None:
    """Choices, strides and believed tokens are equal, even if there are retries, several policies and changing pods."""
    worlds = [World(), World(anew=True)]
    rng = random.Random(1)
    for number in range(600):
        excluded = [PodId(f"pod-{rng.randrange(PODS):03}")] if number % 7 == 0 else []
        policy = rng.choice(POLICY_NAMES) if number % 5 == 0 else "predicted_ttft"
        if number % 100 == 50:
            gone, come = rng.randrange(30), 100 + number
            for world in worlds:
                world.listed = [*(pod for i, pod in enumerate(world.listed) if i != gone), new_pod(come)]
        first, second = (world.ask(number, policy, excluded) for world in worlds)
        assert first == second, number


def test_full_pods_that_publish_nothing_are_judged_as_by_new_tables() -> None:
    """Their room is a column of the table, which every change of a belief keeps current. The chosen pods and the final
    beliefs equal those with new tables."""
    worlds = [World(), World(anew=True)]
    for world in worlds:
        world.listed = [new_foreign_pod(i) for i in range(PODS)]
    rng = random.Random(3)
    for number in range(800):
        deed, place, held = rng.randrange(12), rng.randrange(PODS), rng.randrange(8)
        chosen = []
        for world in worlds:
            pod_id, inbound = world.listed[place].pod_id, world.inbound(number // 2)
            if deed == 0:
                world.chooser.refute(pod_id, inbound.keys, held, world.now_s)
            elif deed == 1:
                world.index.was_held(pod_id, inbound.keys, 0, 400)
            elif deed == 2:
                world.chooser.forget_unused(pod_id, inbound.keys, world.now_s)
            elif deed == 3:
                facts = world.listed[place].facts
                taken = Taken(628, 64.0, facts.kv_capacity_tokens, facts.block_tokens)
                world.chooser.remember(pod_id, inbound.keys, world.now_s, taken)
            elif deed == 4:
                world.chooser.assume(pod_id, [(world.now_s, world.inbound(number).keys)], world.now_s)
            elif deed == 5 and number % 40 == 0:
                world.chooser.forget(pod_id, world.now_s)
            elif deed == 6:
                world.index.retract(pod_id, inbound.keys)
            elif deed == 7 and number % 10 == 0:
                world.listed = sorted(
                    (*world.listed[:place], *world.listed[place + 1 :], new_foreign_pod(1000 + number)),
                    key=lambda pod: pod.pod_id,
                )
                world.index.drop(pod_id)
            chosen.append(world.ask(number, POLICY))
        assert chosen[0] == chosen[1], number
    by_table, one_by_one = (world.index for world in worlds)
    free = [by_table.free_tokens.of(pod.pod_id) for pod in worlds[0].listed]
    assert free == [one_by_one.free_tokens.of(pod.pod_id) for pod in worlds[1].listed]
    assert by_table.regret == one_by_one.regret > 0
    assert 0 < sum(tokens < 500 for tokens in free) < PODS


def test_what_pods_hold_below_their_pools_is_judged_as_by_new_tables() -> None:
    """Pods hold a part of the prompt in host memory or on disk. Fetching it takes less time than computing it."""
    worlds = [World(), World(anew=True)]
    rng = random.Random(4)
    chosen = set()
    for number in range(200):
        place, tier, strides = rng.randrange(PODS), rng.choice((1, 2)), rng.randrange(1, 7)
        asked = []
        for world in worlds:
            stored: list[tuple[PrefixKey, ...]] = [(), (), ()]
            stored[tier] = world.inbound(number).keys[:strides]
            world.index.apply(world.listed[place].pod_id, (), (stored[0], stored[1], stored[2]))
            world.forget()
            least_s = world.chooser.least_ttft_s(world.inbound(number))
            asked.append((round(least_s, 12), world.ask(number, POLICY)))
        assert asked[0] == asked[1], number
        chosen.add(asked[0][1][0])
    assert len(chosen) > 3


def test_waiting_and_times_asked_for_are_judged_as_by_new_tables() -> None:
    """Both ways give the same least time to the first token, and the same patience with pods that have no room."""
    worlds = [World(), World(anew=True)]
    rng = random.Random(2)
    seen = set()
    for number in range(400):
        if number % 50 == 25:
            for world in worlds:
                world.listed = [*world.listed[1:], new_pod(1000 + number)]
        load = LoadReport(cost=StepCost(base_s=0.01, token_s=rng.choice((1e-4, 2e-4, 4e-4))))
        place = rng.randrange(PODS)
        without_room = frozenset(PodId(f"pod-{rng.randrange(PODS):03}") for _ in range(rng.choice((1, 20, 60))))
        judged = []
        for world in worlds:
            world.now_s = 0.01 * number
            world.listed[place].state.report(load, now_s=world.now_s)
            world.forget()
            patience_s = world.chooser.patience_s(world.inbound(number), without_room)
            assert patience_s == world.patience_s(number, without_room)
            judged.append((patience_s, world.chooser.least_ttft_s(world.inbound(number)), world.ask(number, POLICY)))
        assert judged[0][0] == judged[1][0]
        assert judged[0][1] == pytest.approx(judged[1][1], rel=1e-9)
        assert judged[0][2] == judged[1][2]
        seen.add(judged[0][0] > 0)
    assert seen == {True, False}


def test_models_with_the_same_pods_share_a_table_and_pods_forget_one_that_is_gone() -> None:
    pods = [new_pod(i) for i in range(3)]
    free = FreeTokens()
    tables = Tables(free)
    table = tables.of("base", pods)
    assert tables.of("adapter", tuple(pods)) is table
    assert tables.of("base", pods[:2]) is not table
    tables.drop("base")
    tables.drop("adapter")
    assert not any(pod.state._watchers for pod in pods)
    assert not free._watchers
