"""warmroute's gateway with its overload queue, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.pods.routing import HELD, Offered
from router.overload.flow import Waiting
from router.overload.line import TICK_S, WAIT_MARGIN, Line, LineLimits
from router.overload.saturation import ROOM_S
from router.overload.standing import NO_GOAL, goal_of
from router.views.types import PodId

STRIDE = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's own settings."""

    flow: str = "default"
    weight: float = 1.0
    priority: int = 0
    ttft_slo_s: float | None = None
    has_goal: bool = True
    """Whether the queue sheds the request if it stands, as it does by default."""


class Queued(Gateway):
    """`predicted_ttft` behind `router.overload.line`, which `router.forwarding.waiting` uses in the same way."""

    def __init__(
        self, simulation: Simulation, asked: Callable[[int], Asked], *, timeout_s: float, limits: LineLimits
    ) -> None:
        """`asked`: a request's settings by the session's number. `timeout_s`: seconds that a request may wait."""
        super().__init__("predicted_ttft", simulation.timeline, stride=STRIDE)
        self._simulation = simulation
        self._asked = asked
        self._timeout_s = timeout_s
        self._line = Line(limits)
        self._waiting: dict[Waiting, Offered] = {}
        self._is_ticking = False
        self.held = 0
        """Requests that had to wait."""

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """See `Router`; also None for a refused request."""
        asked = self._asked(request.session)
        avoided = self._line.passes(asked.flow, asked.priority, self._serving.listed, now_s)
        if avoided is not None and asked.ttft_slo_s is None:
            return super().choose(request, [*excluded, *avoided], now_s)
        size = len(request.tokens)
        waiting = Waiting(
            asked.flow,
            asked.weight,
            asked.priority,
            size + round(self._estimates.of("simulated").output_tokens),
            4 * size,
            now_s,
            now_s + self._timeout_s,
        )
        wait_s = 0.0 if avoided is not None else self._line.wait_s(waiting)
        own_s = self._chooser.least_ttft_s(self._inbound(request))
        waiting.goal = goal_of(own_s, None) if asked.has_goal else NO_GOAL
        if asked.ttft_slo_s is not None:
            if WAIT_MARGIN * (wait_s or 0.0) + own_s > asked.ttft_slo_s:
                return None
            waiting.deadline_s = min(waiting.deadline_s, now_s + asked.ttft_slo_s - own_s - ROOM_S)
        elif (wait_s is not None and wait_s > self._timeout_s) or self._line.is_hopeless(waiting, now_s):
            return None
        if avoided is not None:
            return super().choose(request, [*excluded, *avoided], now_s)
        self._waiting[waiting] = request
        self.held += 1
        for dropped in self._line.enter(waiting, now_s):
            other = self._waiting.pop(dropped)
            if dropped is waiting:
                return None
            self._simulation.send(other.number, None)
        if self._line.is_within_share(waiting, now_s):
            self._simulation.timeline.after(0, self._look)
        self._tick_soon()
        return HELD

    def _tick_soon(self) -> None:
        if not self._is_ticking and len(self._line):
            self._is_ticking = True
            self._simulation.timeline.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        self._look()
        self._tick_soon()

    def _look(self) -> None:
        now_s = self._simulation.timeline.now_s
        for gone in self._line.expired(now_s):
            self._simulation.send(self._waiting.pop(gone).number, None)
        while (release := self._line.next(self._serving.listed, now_s, self._patience_s)) is not None:
            request = self._waiting.pop(release.request)
            self._simulation.send(request.number, super().choose(request, list(release.avoided), now_s))

    def _patience_s(self, waiting: Waiting, without_room: frozenset[PodId]) -> float:
        return self._chooser.patience_s(self._inbound(self._waiting[waiting]), without_room)
