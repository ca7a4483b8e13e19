"""Decisions over a table of many pods equal decisions by a view of each pod, and so do all later decisions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCost, FetchCosts
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.registry.index import Match, PrefixIndex
from router.routing.policies import POLICY_NAMES, make_policy
from router.routing.predicted_ttft import PredictedTtft
from router.views.pod_partition import Parting
from router.views.pod_state import PodState
from router.views.table import PodTable, WidePolicy
from router.views.types import PodId, PodView, Policy, RequestInfo

STRIDE_TOKENS = 64
KEYS = [tuple(PrefixKey((name + 1) * 2**56 + i) for i in range(12)) for name in range(3)]
COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9, context_s=7e-8, sequence_s=2e-5)
FETCH = (FetchCosts(FetchCost(0.0, 2e-6), FetchCost(0.001, 1e-5)), FetchCosts(disk=FetchCost(0.0, 1e-3)))
SPEEDS = (1.0, 1.1, 1.4, 2.5, 0.3)
PODS = st.integers(0, 39)
EXAMPLES = 25
WIDE = [name for name in POLICY_NAMES if isinstance(make_policy(name), WidePolicy)]


class Fleet(RuleBasedStateMachine):
    """Plays requests, answers, reports and time. Every decision is made both ways, by policies with equal histories."""

    policy = ""

    @initialize(pods=st.integers(1, 40), start_s=st.sampled_from([0.0, 12345.678]))
    def begin(self, pods: int, start_s: float) -> None:
        self.now_s = start_s
        self.states = {PodId(f"pod-{i:02}"): PodState() for i in range(pods)}
        self.index = PrefixIndex()
        self.one_by_one, self.at_once = make_policy(self.policy), make_policy(self.policy)
        self.open: list[tuple[PodState, str]] = []
        self.count = 0
        self.table = self.new_table()
        self.chosen: list[PodId] = []

    def new_table(self) -> PodTable:
        return PodTable(self.states.items())

    def pod(self, number: int) -> tuple[PodId, PodState]:
        return list(self.states.items())[number % len(self.states)]

    @rule(
        prompt=st.sampled_from([100, 900, 3000]),
        name=st.sampled_from([0, 0, 0, 1, 2]),
        strides=st.integers(0, 12),
        own=st.booleans(),
        streams=st.sampled_from([True, True, False]),
        times=st.integers(1, 12),
        parting=st.sampled_from(
            [
                *(None, None, Parting(0.0, 0.5, 0.05), Parting(0.3, 0.7, 0.3), Parting(0.5, 0.51, 0.001)),
                Parting(0.25, 0.5, 0.02, (0.25, 0.5, 0.75)),
            ]
        ),
        regret=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
    )
    def ask(
        self,
        prompt: int,
        name: int,
        strides: int,
        own: bool,
        streams: bool,
        times: int,
        parting: Parting | None,
        regret: float,
    ) -> None:
        rooms = [math.inf if i % 3 == 2 else 397.0 * i % 2000 for i in range(len(self.states))]
        for _ in range(times):
            self.count += 1
            keys = KEYS[name][:strides] + ((PrefixKey(self.count),) if own else ())
            request = RequestInfo(keys, prompt, self.now_s, 60, parting, regret)
            matches = self.index.match(keys, self.now_s)
            views = [self.view(pod_id, state, matches, prompt) for pod_id, state in self.states.items()]
            seen = self.table.at(self.now_s)
            if regret:
                for view, room in zip(views, rooms, strict=True):
                    view.room_tokens = room
                seen.room = np.array(rooms)
            expected = self.one_by_one.choose(request, views)
            sets, tiers = self.index.match_sets(keys, self.now_s)
            for ids, held in sets:
                seen.hold(self.table.rows(ids), min(held * STRIDE_TOKENS, prompt))
            for pod_id, match in tiers.items():
                row = self.table.row(pod_id)
                assert row is not None
                tier_tokens = [min(n * STRIDE_TOKENS, prompt) for n in (match.host_strides, match.disk_strides)]
                seen.fetch(row, *tier_tokens)
            assert isinstance(self.at_once, WidePolicy)
            decision = self.at_once.choose_wide(request, seen)
            if expected.predicted_ttft_s is not None:
                assert decision.predicted_ttft_s == pytest.approx(expected.predicted_ttft_s, rel=1e-12)
            assert replace(decision, predicted_ttft_s=None) == replace(expected, predicted_ttft_s=None)
            pod_id, state = self.pod(expected.pod)
            self.chosen.append(pod_id)
            self.index.speculate(pod_id, keys, self.now_s, 5.0)
            uncached = prompt - views[expected.pod].matched_tokens
            state.sent(
                str(self.count),
                prompt_tokens=prompt,
                uncached_tokens=uncached,
                output_tokens=60,
                now_s=self.now_s,
                streams=streams,
            )
            self.open.append((state, str(self.count)))

    def view(self, pod_id: PodId, state: PodState, matches: Mapping[PodId, Match], prompt: int) -> PodView:
        match = matches.get(pod_id, Match(0))
        tokens, host, disk = (
            min(n * STRIDE_TOKENS, prompt) for n in (match.strides, match.host_strides, match.disk_strides)
        )
        view = state.view(pod_id, now_s=self.now_s, matched_tokens=tokens, host_tokens=host, disk_tokens=disk)
        view.weight, view.fetch = state.weight, state.fetch_costs
        return view

    @rule(number=st.integers(0, 99), cached=st.sampled_from([None, 0, 100]))
    def begin_answer(self, number: int, cached: int | None) -> None:
        if self.open:
            state, request = self.open[number % len(self.open)]
            state.first_token(request, now_s=self.now_s, cached_tokens=cached)

    @rule(number=st.integers(0, 99))
    def end_answer(self, number: int) -> None:
        if self.open:
            state, request = self.open.pop(number % len(self.open))
            state.finished(request, now_s=self.now_s)

    @rule(
        pods=st.lists(PODS, min_size=1, max_size=12),
        speed=st.sampled_from([None, *SPEEDS]),
        others=st.integers(0, 5),
        waiting=st.sampled_from([0, 700, 5000]),
        free=st.sampled_from([100, 60, 5, 0]),
        fetch=st.sampled_from([NO_FETCH_COSTS, *FETCH]),
    )
    def report(
        self, pods: list[int], speed: float | None, others: int, waiting: int, free: int, fetch: FetchCosts
    ) -> None:
        cost = StepCost() if speed is None else replace(COST, token_s=COST.token_s * speed, base_s=COST.base_s * speed)
        load = LoadReport(others + 2, 1, waiting, others, 900 * others, free, 100, cost=cost, fetch=fetch)
        for number in pods:
            self.pod(number)[1].report(load, now_s=self.now_s)

    @rule(number=PODS, tokens=st.sampled_from([1, 500, 5000]))
    def another_gateway_sends(self, number: int, tokens: int) -> None:
        for policy in (self.one_by_one, self.at_once):
            if isinstance(policy, PredictedTtft):
                policy.sent_elsewhere(self.pod(number)[0], tokens, self.now_s)

    @rule(number=PODS, weight=st.sampled_from([0.5, 1.0, 3.0]))
    def weigh(self, number: int, weight: float) -> None:
        self.pod(number)[1].weight = weight

    @rule(number=PODS, name=st.integers(0, 2), strides=st.integers(1, 12), tier=st.integers(0, 2))
    def hold(self, number: int, name: int, strides: int, tier: int) -> None:
        stored: list[Any] = [(), (), ()]
        stored[tier] = KEYS[name][:strides]
        self.index.apply(self.pod(number)[0], (), (stored[0], stored[1], stored[2]))

    @rule(seconds=st.sampled_from([1e-3, 5e-3, 0.02, 0.1, 1.0, 3.0, 5.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(number=PODS)
    def leave(self, number: int) -> None:
        """Remove a pod; a new table is made."""
        if len(self.states) > 1:
            pod_id, gone = self.pod(number)
            self.table.close()
            del self.states[pod_id]
            self.index.drop(pod_id)
            self.open = [(state, request) for state, request in self.open if state is not gone]
            self.table = self.new_table()


@pytest.mark.parametrize("name", WIDE)
def test_many_pods_at_once_and_one_by_one_decide_alike(name: str) -> None:
    machine = type("Machine", (Fleet,), {"policy": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None))


def decide_alike(one: Policy, many: Policy, request: RequestInfo, table: PodTable, held: Mapping[PodId, int]) -> PodId:
    """Decide in both ways, for pods that hold so many tokens of the prompt; return the pod."""
    states = dict(zip(table.ids, table._states, strict=True))
    views = [state.view(pod, now_s=request.now_s, matched_tokens=held[pod]) for pod, state in states.items()]
    seen = table.at(request.now_s)
    for tokens in sorted(set(held.values()) - {0}):
        seen.hold(table.rows([pod for pod in table.ids if held[pod] >= tokens]), tokens)
    assert isinstance(many, WidePolicy)
    expected, decision = one.choose(request, views), many.choose_wide(request, seen)
    assert decision.pod == expected.pod
    return table.ids[decision.pod]


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_popular_prefixes_decide_alike_however_unlike_the_loads(seed: int) -> None:
    rng = random.Random(seed)
    states = {PodId(f"pod-{i}"): PodState() for i in range(8)}
    table = PodTable(states.items())
    policies = make_policy("affinity_groups"), make_policy("affinity_groups")
    held: dict[PrefixKey, set[PodId]] = {}
    for number in range(600):
        now_s = 0.1 * number
        state = rng.choice(list(states.values()))
        crowd, tokens = rng.choice(((0, 0), (1, 500), (4, 900), (9, 0), (30, 5000)))
        state.report(LoadReport(running=crowd, uncached_tokens=tokens, decoding=crowd, cost=COST), now_s=now_s)
        if number % 100 == 50:
            state.weight = rng.choice((0.5, 1.0, 2.0))
        name = rng.choice((0, 0, 0, 1, 2 + number % 40, 2 + number % 40))
        shared = rng.choice((3, 3, 8)) if name < 2 else 4
        keys = tuple(PrefixKey((name + 1) * 2**32 + i) for i in range(shared))
        keys += tuple(PrefixKey(2**60 + 100 * number + i) for i in range(rng.choice((0, 1, 4))))
        matched = dict.fromkeys(states, 0)
        for depth, key in enumerate(keys, start=1):
            matched |= dict.fromkeys(held.get(key, ()), depth * STRIDE_TOKENS)
        prompt = len(keys) * STRIDE_TOKENS + rng.choice((0, 1, 40))
        chosen = decide_alike(*policies, RequestInfo(keys, prompt, now_s, 60), table, matched)
        for key in keys:
            held.setdefault(key, set()).add(chosen)


@pytest.mark.parametrize("seed", range(4))
def test_equally_warm_pods_decide_alike_within_a_step_of_the_last_request(seed: int) -> None:
    """Each pod holds all of the prompt, so a request takes less time than the step that it waits for."""
    rng = random.Random(seed)
    states = {PodId(f"pod-{i}"): PodState() for i in range(4)}
    table = PodTable(states.items())
    policies = make_policy("predicted_ttft"), make_policy("predicted_ttft")
    for state in states.values():
        state.report(LoadReport(cost=COST), now_s=0.0)
    begun: list[tuple[PodState, str]] = []
    now_s = 1.0
    for number in range(600):
        now_s += rng.choice((0.0, 5e-4, 2e-3, 8e-3))
        chosen = decide_alike(*policies, RequestInfo(KEYS[0], 800, now_s, 60), table, dict.fromkeys(states, 800))
        states[chosen].sent(str(number), prompt_tokens=800, uncached_tokens=1, output_tokens=60, now_s=now_s)
        begun.append((states[chosen], str(number)))
        for state, request in rng.sample(begun, rng.choice((0, 1, 2)) if len(begun) > 4 else 0):
            state.first_token(request, now_s=now_s)
            if rng.random() < 0.5:
                state.finished(request, now_s=now_s)
                begun.remove((state, request))


def test_a_row_is_made_anew_when_what_was_seen_of_a_pods_speed_is_too_old() -> None:
    state = PodState()
    table = PodTable([(PodId("a"), state)])
    for number in range(12):
        state.sent(str(number), prompt_tokens=100, uncached_tokens=100, output_tokens=1, now_s=number)
        state.first_token(str(number), now_s=number + 0.1)
        state.finished(str(number), now_s=number + 0.2)
    for now_s in (12.0, 70.0, 72.0, 80.0):
        assert table.at(now_s).columns.is_prior[0] == state.view(PodId("a"), now_s=now_s).cost_is_prior
    assert state.view(PodId("a"), now_s=70.0).cost_is_prior is False
