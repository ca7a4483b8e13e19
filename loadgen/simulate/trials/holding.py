"""Late binding: requests wait at the gateway while every pod has more than a step of prefill queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.errors import Unavailable
from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.pod import Report
from loadgen.simulate.routing import HELD, Offered
from router.routing.types import PodView

SCANNED = 32
"""Requests at the head of the queue that are looked at when a pod has room: each look is a decision."""
PATIENCE_S = 30.0
"""A request held so long goes wherever it suits best."""
AGEING_TOKENS_PER_S = 5000.0
"""Shortest first: a second of waiting weighs as much as so many tokens of prefill."""


@dataclass(slots=True)
class _Held:
    request: Offered
    excluded: tuple[str, ...]
    since_s: float
    rank: float


class Holding(Gateway):
    """`predicted_ttft` with a queue of its own in front. When a pod has room again, the first request in the queue
    that `predicted_ttft` would send to a pod with room goes there.
    """

    shortest_first = False

    def __init__(self, simulation: Simulation, stride: int) -> None:
        super().__init__("predicted_ttft", simulation.timeline, stride=stride)
        self._simulation = simulation
        self._step_tokens = max(pod.spec.max_step_tokens for pod in simulation.pods.values())
        self._held: list[_Held] = []

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """See `Router`."""
        try:
            best, pods = self._look(request)
        except Unavailable:
            return None
        if excluded or self._has_room(best) or any(self._has_room(pod) for pod in pods):
            return super().choose(request, excluded, now_s)
        ahead = (len(request.tokens) - best.matched_tokens) / AGEING_TOKENS_PER_S if self.shortest_first else 0.0
        self._held.append(_Held(request, tuple(excluded), now_s, now_s + ahead))
        self._held.sort(key=lambda held: held.rank)
        return HELD

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        """See `Router`."""
        super().first_token(request, pod, cached_tokens, now_s)
        self._let_go(now_s)

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """See `Router`."""
        super().ended(request, pod, now_s, completed=completed)
        self._let_go(now_s)

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`."""
        super().reported(pod, report, now_s)
        self._let_go(now_s)

    def _let_go(self, now_s: float) -> None:
        """Send what may go. A request that did not suit a pod with room will not do so for what is sent after it."""
        place = 0
        for _ in range(min(len(self._held), SCANNED)):
            held = self._held[place]
            try:
                best, pods = self._look(held.request)
            except Unavailable:
                best, pods = None, []
            if best is None or self._has_room(best) or now_s - held.since_s > PATIENCE_S:
                del self._held[place]
                self._simulation.send(held.request.number, super().choose(held.request, held.excluded, now_s))
            elif any(self._has_room(pod) for pod in pods):
                place += 1
            else:
                return

    def _look(self, request: Offered) -> tuple[PodView, Sequence[PodView]]:
        """The pod that suits the request best, and all. Raises Unavailable."""
        choice, _, views = self._chooser.explain(self._inbound(request))
        return views[choice.decision.pod], views

    def _has_room(self, pod: PodView) -> bool:
        return pod.in_flight_uncached_tokens < self._step_tokens


class HoldingShortestFirst(Holding):
    """The queue in order of uncached tokens, with ageing."""

    shortest_first = True
