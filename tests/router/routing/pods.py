"""Pods made by hand, and what policies see of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCosts
from engine.contract.load import StepCost
from router.routing.fetching import add_shared
from router.views.pod_row import PodRow
from router.views.pod_state import PodState
from router.views.table import CandidatePods, PodTable, Policy
from router.views.types import Decision, PodId, RequestInfo


@dataclass(slots=True)
class Made:
    """A pod in numbers."""

    pod_id: PodId
    matched_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    in_flight: int = 0
    uncached_tokens: int = 0
    """Prompt tokens of its requests that are still to be prefilled."""
    decoding: int = 0
    context_tokens: int = 0
    free_at_s: float = 0.0
    """When its queued prefill ends."""
    stepped_s: float = -math.inf
    cost: StepCost = field(default_factory=StepCost)
    cost_is_prior: bool = False
    weight: float = 1.0
    adapter_s: float = 0.0
    room_tokens: float = math.inf
    overhead_s: float = 0.0
    fetch_costs: FetchCosts = NO_FETCH_COSTS


class _Pod:
    """A `router.views.table.TablePod` that never changes."""

    def __init__(self, made: Made) -> None:
        self._made = made

    @property
    def cost(self) -> StepCost:
        return self._made.cost

    @property
    def fetch_costs(self) -> FetchCosts:
        return self._made.fetch_costs

    def row(self, now_s: float) -> PodRow[float]:
        made = self._made
        return PodRow(
            free_at_s=made.free_at_s,
            due_s=math.inf,
            late_step_s=0.0,
            others_until_s=-math.inf,
            others_trust=0.0,
            others_span_s=1.0,
            others_uncached=0.0,
            own_uncached=made.uncached_tokens,
            in_flight=made.in_flight,
            is_busy=made.in_flight > 0,
            has_waiting=made.in_flight > made.decoding,
            decoding=made.decoding,
            context_tokens=made.context_tokens,
            stepped_s=made.stepped_s,
            token_s=made.cost.token_s,
            overhead_s=made.overhead_s,
            weight=made.weight,
            shared_latency_s=made.fetch_costs.shared.latency_s,
            shared_token_s=made.fetch_costs.shared.token_s,
            is_prior=made.cost_is_prior,
            valid_until_s=math.inf,
        )

    def watch(self, changed: set[Any]) -> None:
        """It never changes."""

    def unwatch(self, changed: set[Any]) -> None:
        """It never changes."""


def candidates(pods: Sequence[Made], now_s: float = 0.0) -> CandidatePods:
    """Return what policies see, in the order of `pods`."""
    seen = PodTable([(pod.pod_id, _Pod(pod)) for pod in pods], is_kept=False).at(now_s)
    for row, pod in enumerate(pods):
        if pod.matched_tokens:
            seen.hold(np.array([row]), pod.matched_tokens)
        if pod.host_tokens or pod.disk_tokens:
            seen.fetch(row, pod.host_tokens, pod.disk_tokens)
    add_shared(seen)
    if any(not math.isinf(pod.room_tokens) for pod in pods):
        seen.free_tokens = np.array([pod.room_tokens for pod in pods])
    if any(pod.adapter_s for pod in pods):
        seen.adapter_s = np.array([pod.adapter_s for pod in pods])
    return seen


def choose(policy: Policy, request: RequestInfo, pods: Sequence[Made], *, explain: bool = False) -> Decision:
    """Return the policy's choice among the pods."""
    return policy.choose(request, candidates(pods), explain=explain)


def seen_of(state: PodState, now_s: float, pod_id: str = "pod") -> Made:
    """Return what a policy sees of one pod now."""
    seen = PodTable([(PodId(pod_id), state)], is_kept=False).at(now_s)
    row = {name: float(column[0]) for name, column in seen.columns._asdict().items()}
    return Made(
        PodId(pod_id),
        in_flight=round(row["in_flight"]),
        uncached_tokens=round(float(seen.uncached(now_s)[0])),
        decoding=round(row["decoding"]),
        context_tokens=round(row["context_tokens"]),
        free_at_s=float(seen.free_at_s(now_s)[0]),
        stepped_s=row["stepped_s"],
        cost=state.cost,
        cost_is_prior=bool(row["is_prior"]),
        weight=row["weight"],
        overhead_s=row["overhead_s"],
        fetch_costs=state.fetch_costs,
    )
