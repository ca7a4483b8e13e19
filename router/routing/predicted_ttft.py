"""`predicted_ttft`: the pod on which this request's first token, and the delay it causes others, cost least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.load import StepCost
from router.routing.debt import Debts
from router.routing.latency import decode_s, prefill_s
from router.routing.pick import decide, lowest
from router.routing.types import Decision, PodView, RequestInfo


@dataclass(slots=True)
class _Cost:
    """Seconds, as DESIGN.md 5 names them."""

    wait_s: float
    own_s: float
    step_s: float
    fetch_s: float
    externality_s: float
    pressure_s: float
    duplicate_s: float
    """Part of `own_s` that a pod with the longest match would be spared."""
    switch_s: float = 0.0
    credit_s: float = 0.0
    """What is owed to the prefix, taken off for a pod that would be a further copy."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.own_s + self.step_s + self.fetch_s

    @property
    def score_s(self) -> float:
        return self.ttft_s + self.externality_s + self.pressure_s + self.switch_s - self.credit_s


class PredictedTtft:
    """Everything in seconds, with constants learnt for each pod; the options are shares of those.

    Each request alone rather waits for a pod that holds its prefix than pays for another copy, though all that follow
    would profit from one. So what they lose by waiting is booked as a debt to the prefix; once that and what
    the request at hand would save make up the price of a copy, it is paid for (the rule of ski rental: at most twice the cost of having known).
    """

    name = "predicted_ttft"

    def __init__(self, *, host_share: float, disk_share: float, pressure_weight: float, switch_margin: float) -> None:
        self._host_share = host_share
        self._disk_share = disk_share
        self._pressure_weight = pressure_weight
        self._switch_margin = switch_margin
        self._debts = Debts()

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        costs = self._costs(request, pods)
        strides = math.ceil(max(pod.matched_tokens for pod in pods) * len(request.keys) / request.prompt_tokens)
        account = self._debts.account(request.keys, min(strides, len(request.keys)))
        owed_s = 0.0 if account is None else self._debts.owed_s(account, request.now_s)
        for cost in costs:
            cost.switch_s = self._switch_margin * cost.duplicate_s
            cost.credit_s = min(owed_s, cost.duplicate_s + cost.switch_s)
        scores = [cost.score_s for cost in costs]
        chosen = lowest(request, pods, scores)
        if explain:
            parts = [{name: getattr(cost, name) for name in _Cost.__slots__} for cost in costs]
            return decide(self.name, pods, chosen, scores, parts, costs[chosen].ttft_s)
        if account is not None:
            self._debts.book(account, _owed_after(costs, costs[chosen], owed_s), request.now_s)
        return decide(self.name, pods, chosen, predicted_ttft_s=costs[chosen].ttft_s)

    def _costs(self, request: RequestInfo, pods: Sequence[PodView]) -> list[_Cost]:
        known = [pod.cost for pod in pods if not pod.cost_is_prior]
        peers = _typical(known) if len(known) < len(pods) else None
        speeds = [peers if pod.cost_is_prior and peers else pod.cost for pod in pods]
        # The queue of a pod that is taken for as fast as its peers was reckoned at its own, unfounded speed.
        waits_s = [
            max(0.0, pod.prefill_free_at_s - request.now_s) * (cost.token_s / pod.cost.token_s)
            for pod, cost in zip(pods, speeds, strict=True)
        ]
        mean_wait_s = math.fsum(waits_s) / len(pods)
        longest = max(pod.matched_tokens for pod in pods)
        return [
            self._cost(request, pod, cost, wait_s, mean_wait_s, longest)
            for pod, cost, wait_s in zip(pods, speeds, waits_s, strict=True)
        ]

    def _cost(
        self,
        request: RequestInfo,
        pod: PodView,
        cost: StepCost,
        wait_s: float,
        mean_wait_s: float,
        longest_match: int,
    ) -> _Cost:
        prompt = request.prompt_tokens
        step_s = decode_s(cost, pod.decoding, pod.context_tokens)
        own_s = prefill_s(cost, max(1, prompt - pod.matched_tokens), prompt)
        full = min(pod.kv_used, 0.98)
        return _Cost(
            # A pod with anything in flight is within a step, and a step that has begun is half over on average.
            wait_s=max(wait_s, step_s / 2 if pod.in_flight else 0.0),
            own_s=own_s,
            step_s=step_s,
            fetch_s=cost.token_s * (self._host_share * pod.host_tokens + self._disk_share * pod.disk_tokens),
            externality_s=min(own_s, mean_wait_s),
            # Out of blocks, the pod preempts: work of about this prompt's size is done twice, the likelier the fuller.
            pressure_s=self._pressure_weight * cost.token_s * prompt * full**4 / (1 - full),
            duplicate_s=own_s - prefill_s(cost, max(1, prompt - longest_match), prompt),
        )


def _owed_after(costs: Sequence[_Cost], chosen: _Cost, owed_s: float) -> float:
    """The debt after this request: paid down by a copy, else grown by what the request would have saved with one."""
    if chosen.duplicate_s > 0:
        return owed_s - chosen.credit_s
    lost_s = chosen.score_s - min(cost.score_s + cost.credit_s - cost.switch_s - cost.duplicate_s for cost in costs)
    return min(owed_s + max(0.0, lost_s), max(cost.duplicate_s + cost.switch_s for cost in costs))


def _typical(costs: Sequence[StepCost]) -> StepCost | None:
    """The mean of the pods' constants; None without a pod."""
    if not costs:
        return None
    count = len(costs)
    return StepCost(
        math.fsum([cost.base_s for cost in costs]) / count,
        math.fsum([cost.token_s for cost in costs]) / count,
        math.fsum([cost.attention_s for cost in costs]) / count,
        math.fsum([cost.context_s for cost in costs]) / count,
        math.fsum([cost.sequence_s for cost in costs]) / count,
    )
