"""`predicted_ttft`: the pod on which this request's first token, and the delay it causes others, cost least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.routing.latency import decode_s, prefill_s
from router.routing.pick import decide, lowest
from router.routing.types import Decision, PodView, RequestInfo


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds, as DESIGN.md 5 names them."""

    wait_s: float
    own_s: float
    step_s: float
    fetch_s: float
    externality_s: float
    pressure_s: float
    switch_s: float

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.own_s + self.step_s + self.fetch_s

    @property
    def score_s(self) -> float:
        return self.ttft_s + self.externality_s + self.pressure_s + self.switch_s


class PredictedTtft:
    """Everything in seconds, with constants learnt for each pod; the options are shares of those."""

    name = "predicted_ttft"

    def __init__(self, *, host_share: float, disk_share: float, pressure_weight: float, switch_margin: float) -> None:
        self._host_share = host_share
        self._disk_share = disk_share
        self._pressure_weight = pressure_weight
        self._switch_margin = switch_margin

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        mean_wait_s = sum(max(0.0, pod.prefill_free_at_s - request.now_s) for pod in pods) / len(pods)
        longest = max(pod.matched_tokens for pod in pods)
        costs = [self._cost(request, pod, mean_wait_s, longest) for pod in pods]
        scores = [cost.score_s for cost in costs]
        chosen = lowest(request, pods, scores)
        if not explain:
            return decide(self.name, pods, chosen, predicted_ttft_s=costs[chosen].ttft_s)
        parts = [{name: getattr(cost, name) for name in _Cost.__slots__} for cost in costs]
        return decide(self.name, pods, chosen, scores, parts, costs[chosen].ttft_s)

    def _cost(self, request: RequestInfo, pod: PodView, mean_wait_s: float, longest_match: int) -> _Cost:
        cost, prompt = pod.cost, request.prompt_tokens
        step_s = decode_s(cost, pod.decoding, pod.context_tokens)
        # A pod with anything in flight is within a step, and a step that has begun is half over on average.
        wait_s = max(pod.prefill_free_at_s - request.now_s, step_s / 2 if pod.in_flight else 0.0)
        own_s = prefill_s(cost, max(1, prompt - pod.matched_tokens), prompt)
        recompute_s = cost.token_s * (longest_match - pod.matched_tokens)
        full = min(pod.kv_used, 0.98)
        return _Cost(
            wait_s=wait_s,
            own_s=own_s,
            step_s=step_s,
            fetch_s=cost.token_s * (self._host_share * pod.host_tokens + self._disk_share * pod.disk_tokens),
            externality_s=min(own_s, mean_wait_s),
            # Out of blocks, the pod preempts: work of about this prompt's size is done twice, the likelier the fuller.
            pressure_s=self._pressure_weight * cost.token_s * prompt * full**4 / (1 - full),
            switch_s=self._switch_margin * recompute_s,
        )
