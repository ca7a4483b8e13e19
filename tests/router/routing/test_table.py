"""A table that is kept current decides as one made anew for each decision, and so do all later decisions."""

from __future__ import annotations

import math
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
from router.registry.index import PrefixIndex
from router.routing.policies import POLICY_NAMES, make_policy
from router.routing.predicted_ttft import PredictedTtft
from router.views.pod_partition import PodPartition
from router.views.pod_state import PodState
from router.views.table import CandidatePods, PodTable
from router.views.types import PodId, RequestInfo

STRIDE_TOKENS = 64
KEYS = [tuple(PrefixKey((name + 1) * 2**56 + i) for i in range(12)) for name in range(3)]
COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9, context_s=7e-8, sequence_s=2e-5)
FETCH = (FetchCosts(FetchCost(0.0, 2e-6), FetchCost(0.001, 1e-5)), FetchCosts(disk=FetchCost(0.0, 1e-3)))
SPEEDS = (1.0, 1.1, 1.4, 2.5, 0.3)
PODS = st.integers(0, 39)
EXAMPLES = 25


class Fleet(RuleBasedStateMachine):
    """Plays requests, answers, reports and time. Every decision is made with both tables, by policies with equal
    histories."""

    policy = ""

    @initialize(pods=st.integers(1, 40), start_s=st.sampled_from([0.0, 12345.678]))
    def begin(self, pods: int, start_s: float) -> None:
        self.now_s = start_s
        self.states = {PodId(f"pod-{i:02}"): PodState() for i in range(pods)}
        self.index = PrefixIndex()
        self.of_kept, self.of_new = make_policy(self.policy), make_policy(self.policy)
        self.open: list[tuple[PodState, str]] = []
        self.count = 0
        self.table = self.new_table()
        self.chosen: list[PodId] = []

    def new_table(self, *, is_kept: bool = True) -> PodTable:
        return PodTable(self.states.items(), is_kept=is_kept)

    def pod(self, number: int) -> tuple[PodId, PodState]:
        return list(self.states.items())[number % len(self.states)]

    @rule(
        prompt=st.sampled_from([100, 900, 3000]),
        name=st.sampled_from([0, 0, 0, 1, 2]),
        strides=st.integers(0, 12),
        own=st.booleans(),
        streams=st.sampled_from([True, True, False]),
        times=st.integers(1, 12),
        partition=st.sampled_from(
            [
                None,
                None,
                PodPartition(0.0, 0.5, 0.05),
                PodPartition(0.3, 0.7, 0.3),
                PodPartition(0.5, 0.51, 0.001),
                PodPartition(0.25, 0.5, 0.02, (0.25, 0.5, 0.75)),
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
        partition: PodPartition | None,
        regret: float,
    ) -> None:
        rooms = [math.inf if i % 3 == 2 else 397.0 * i % 2000 for i in range(len(self.states))]
        for _ in range(times):
            self.count += 1
            keys = KEYS[name][:strides] + ((PrefixKey(self.count),) if own else ())
            request = RequestInfo(keys, prompt, self.now_s, 60, partition, regret)
            decisions = []
            for policy, table in ((self.of_kept, self.table), (self.of_new, self.new_table(is_kept=False))):
                seen = self.seen(table, keys, prompt)
                if regret:
                    seen.free_tokens = np.array(rooms)
                decisions.append(policy.choose(request, seen))
                uncached = prompt - seen.matched_by(decisions[0].pod)
            decision, expected = decisions
            assert decision == expected
            pod_id, state = self.pod(expected.pod)
            self.chosen.append(pod_id)
            self.index.speculate(pod_id, keys, self.now_s, 5.0)
            state.sent(
                str(self.count),
                prompt_tokens=prompt,
                uncached_tokens=uncached,
                output_tokens=60,
                now_s=self.now_s,
                streams=streams,
            )
            self.open.append((state, str(self.count)))

    def seen(self, table: PodTable, keys: tuple[PrefixKey, ...], prompt: int) -> CandidatePods:
        seen = table.at(self.now_s)
        sets, tiers = self.index.match_sets(keys, self.now_s)
        for ids, held in sets:
            seen.hold(table.rows(ids), min(held * STRIDE_TOKENS, prompt))
        for pod_id, match in tiers.items():
            row = table.row(pod_id)
            assert row is not None
            host_tokens, disk_tokens = (
                min(n * STRIDE_TOKENS, prompt) for n in (match.host_strides, match.disk_strides)
            )
            seen.fetch(row, host_tokens, disk_tokens)
        return seen

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
        for policy in (self.of_kept, self.of_new):
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


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_kept_table_decides_as_one_made_anew(name: str) -> None:
    machine = type("Machine", (Fleet,), {"policy": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None))


def test_a_row_is_made_anew_when_what_was_seen_of_a_pods_speed_is_too_old() -> None:
    state = PodState()
    table = PodTable([(PodId("a"), state)])
    for number in range(12):
        state.sent(str(number), prompt_tokens=100, uncached_tokens=100, output_tokens=1, now_s=number)
        state.first_token(str(number), now_s=number + 0.1)
        state.finished(str(number), now_s=number + 0.2)
    known = [not table.at(now_s).columns.is_prior[0] for now_s in (12.0, 70.0, 72.0, 80.0)]
    assert known == [state.knows_speed(now_s) for now_s in (12.0, 70.0, 72.0, 80.0)] == [True, True, False, False]
