"""`predicted_ttft` for many pods: the sums of `PredictedTtft._costs`, in the same order, for all pods at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from engine.contract.load import StepCost
from router.routing.fetching import wide_fetch_or_compute_s
from router.routing.weights import Weights
from router.views.latency import EVENNESS, STEP_TOKENS, decode_s, prefill_s
from router.views.pod_partition import Parting, spared_unseen_s
from router.views.row import PodRow
from router.views.table import Floats, Speeds, WidePods
from router.views.types import RequestInfo


@dataclass(slots=True)
class WideCosts:
    """The numbers of `Costs`, as an array over pods, or once if all pods have the same number."""

    ttft_s: Floats
    own_s: float | Floats
    duplicate_s: float | Floats
    switch_s: float | Floats
    credit_s: float | Floats
    scores: Floats
    step_s: Floats
    """Seconds of a step of the pod without its prefill."""


def wide_costs(
    request: RequestInfo, pods: WidePods, owed_s: float, usual_s: float, usual_least_s: float, weights: Weights
) -> WideCosts:
    """Return what each pod would cost, and its score."""
    now_s, prompt, columns = request.now_s, request.prompt_tokens, pods.columns
    speeds = pods.table.speeds(weights.same_speed)
    cost: Any = _as_cost(speeds)
    wait_s: Floats = np.maximum(pods.free_at_s(now_s) - now_s, 0.0)
    wait_s *= speeds.own_share
    mean_wait_s = math.fsum(wait_s.tolist()) / len(wait_s)
    least_tokens = max(1, prompt - pods.longest)
    uncached: Any = prompt if pods.matched is None else np.maximum(prompt - pods.matched, 1.0)
    own_s: Any = prefill_s(cost, uncached, prompt)
    stalled_s = np.minimum(own_s, usual_s)
    decoding: Any = columns.decoding
    step_s: Any = decode_s(cost, decoding, cast(Any, columns.context_tokens))
    # As `step_left_s`, where anything is in flight.
    left_s = np.maximum(step_s / 2, step_s - (now_s - columns.stepped_s))
    left_s *= columns.in_flight > 0
    wait_s = np.maximum(wait_s, left_s)
    steps_s = step_s
    if prompt > STEP_TOKENS:
        steps_s = step_s * (1 + np.maximum(uncached / STEP_TOKENS - 1, 0.0))
    ttft_s = wait_s + own_s + steps_s
    if pods.tiers is not None:
        ttft_s += wide_fetch_or_compute_s(pods.tiers, cost, uncached, prompt, weights)
    ttft_s += _overheads_s(speeds, columns)
    scores = ttft_s + np.minimum(own_s, mean_wait_s)
    scores += weights.pressure_weight * cost.token_s * prompt * columns.fullness
    scores += np.minimum(stalled_s, STEP_TOKENS * cost.token_s) * (columns.in_flight > columns.decoding)
    stall = weights.stall_weight * columns.decoding
    stall_s = stall * stalled_s
    scores += stall_s
    if request.regret and pods.room is not None:
        evicted = np.maximum(uncached + request.output_tokens - pods.room, 0.0)
        scores += request.regret * cost.token_s * evicted
    if request.parting is not None:
        scores += _others_s(request.parting, pods, cost)
    if pods.matched is None:
        return WideCosts(ttft_s, own_s, 0.0, 0.0, 0.0, scores, step_s)
    least_s = prefill_s(cost, least_tokens, prompt)
    duplicate_s = own_s - least_s + stall_s - stall * np.minimum(least_s, usual_s)
    duplicate_s *= uncached > least_tokens
    switch_s = weights.switch_margin * duplicate_s
    scores += switch_s
    credit_s: float | Floats = 0.0
    if owed_s:
        credit_s = np.minimum(owed_s, duplicate_s + switch_s)
        if usual_least_s < math.inf:
            credit_s *= 1 - np.maximum(least_s - usual_least_s, 0.0) / own_s
        scores -= credit_s
    return WideCosts(ttft_s, own_s, duplicate_s, switch_s, credit_s, scores, step_s)


def wide_uneven_s(request: RequestInfo, pods: WidePods, costs: WideCosts) -> Floats:
    """Return `Costs.uneven_s` of each pod."""
    columns = pods.columns
    unbegun_s: Floats = np.maximum(costs.step_s - (request.now_s - columns.sent_s), 0.0)
    unbegun_s *= EVENNESS * (columns.in_flight > columns.decoding)
    return unbegun_s


def _others_s(parting: Parting, pods: WidePods, cost: Any) -> Floats:
    """Return the seconds of prefill that other gateways may have just sent to each pod."""
    others_s: Floats = np.full(len(pods.table), parting.unseen_s)
    if pods.matched is not None and (least_s := unseen_at_most_s(parting, pods, cost)) < parting.unseen_s:
        others_s[pods.matched == pods.longest] *= least_s / parting.unseen_s
    own = parting.own_rows(len(pods.table))
    others_s[own.start : own.stop] = 0.0
    return others_s


def unseen_at_most_s(parting: Parting, pods: WidePods, cost: Any) -> float:
    """Return the most seconds of prefill that another gateway may have just sent to a pod with the longest match."""
    assert pods.matched is not None
    return spared_unseen_s(parting, float(np.min(cost.token_s)), pods.longest - float(pods.matched.min()))


def own_parts(parting: Parting, pods: int) -> Floats:
    """Return `Parting.part` of each of `pods` pods."""
    rows = np.arange(pods, dtype=np.float64)
    parts: Floats = np.minimum(parting.high * pods, rows + 1) - np.maximum(parting.low * pods, rows)
    return np.maximum(parts, 0.0)


def _overheads_s(speeds: Speeds, columns: PodRow[Floats]) -> Floats:
    """Return each pod's overhead; pods in `Speeds.apart` have the median pod's."""
    if not speeds.apart:
        return columns.overhead_s
    overheads_s = columns.overhead_s.copy()
    overheads_s[list(speeds.apart)] = overheads_s[speeds.median_row]
    return overheads_s


def _as_cost(speeds: Speeds) -> StepCost | Speeds:
    """Return an object with the fields of a `StepCost`: the formulas take arrays in place of numbers."""
    return speeds if speeds.unlike else speeds.median


def wide_owed_after(costs: WideCosts, chosen: int, owed_s: float, share: float) -> float:
    """As `predicted_ttft._owed_after`."""
    if isinstance(costs.duplicate_s, float):
        return 0.0
    assert not isinstance(costs.switch_s, float)
    is_lacking = costs.duplicate_s > 0
    lacking = is_lacking.nonzero()[0]
    if not len(lacking):
        return 0.0
    scores, best_s = costs.scores, float(costs.scores[chosen])
    if is_lacking[chosen]:
        best_s = float(scores[~is_lacking].min())
        credit_s = 0.0 if isinstance(costs.credit_s, float) else float(costs.credit_s[chosen])
        owed_s -= min(credit_s, max(0.0, float(scores[chosen]) + credit_s - best_s))
    duplicate_s, switch_s = costs.duplicate_s[lacking], costs.switch_s[lacking]
    with_copies_s = scores[lacking]
    if not isinstance(costs.credit_s, float):
        with_copies_s += costs.credit_s[lacking]
    with_copies_s = with_copies_s - switch_s - duplicate_s
    spared_s = math.fsum(np.maximum(best_s - with_copies_s, 0.0).tolist()) / len(lacking)
    return min(owed_s + spared_s / share, float((duplicate_s + switch_s).max()))
