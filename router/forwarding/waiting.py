"""The queues of requests that wait while every pod of their model is saturated, or while the model has no pod."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract import headers
from engine.contract.errors import ApiError, TooManyRequests, Unavailable
from router.choosing.chooser import Chooser
from router.edge.errors import SCALING_RETRY_AFTER_S, NoEngine
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.forwarding.exchange import Arrival, Exchange
from router.overload.flow import Waiting
from router.overload.full import NO_PODS
from router.overload.line import TICK_S, WAIT_MARGIN, Line, LineLimits
from router.overload.saturation import ROOM_S
from router.overload.standing import Goals, goal_of
from router.reading.inbound import Inbound
from router.telemetry.metrics import Metrics
from router.views.types import PodId

LONGEST_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """Bounds of the waiting room: seconds from a request's arrival while every pod is saturated (`queue_s`), or while
    the model has no pod (`activation_s`). 0: requests do not wait."""

    queue_s: float
    activation_s: float
    line: LineLimits
    goals: Goals = field(default_factory=Goals)


@dataclass(slots=True, eq=False)
class _Held:
    inbound: Inbound
    tenant: str
    placed: asyncio.Future[frozenset[PodId]]


class WaitingRoom:
    """One queue for each model. A request enters by `place`, which returns when the request may go on."""

    def __init__(self, fleet: Fleet, chooser: Chooser, metrics: Metrics, limits: RoomLimits) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._metrics = metrics
        self._limits = limits
        self._lines: dict[str, Line] = {}
        """Queues by model; the fleet bounds how many there are."""
        self._held: dict[Waiting, _Held] = {}
        self._timer: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def wakes_models(self) -> bool:
        """Whether requests wait for models that have no pod."""
        return self._limits.activation_s > 0

    def waiting(self) -> Mapping[str, int]:
        """Return the number of waiting requests for every known model."""
        return {
            model: len(self._lines[model]) if model in self._lines else 0 for model in self._fleet.engines_by_model()
        }

    def waiting_tenants(self) -> Counter[str]:
        """Return the number of waiting requests by tenant. Takes time proportional to all of them."""
        return Counter(held.tenant for held in self._held.values())

    def full(self, model: str) -> frozenset[PodId] | None:
        """Return the pods without room; None if a request for the model would have to wait."""
        line = self._lines.get(model)
        if line is None or not self._limits.queue_s:
            return NO_PODS
        return line.without_room(self._fleet.pods(model), self._loop.time())

    def busy(self, model: str) -> frozenset[PodId] | None:
        """Return the full or contended pods, for an optional request such as a hedge; None if requests wait or did
        lately."""
        line = self._lines.get(model)
        return NO_PODS if line is None else line.busy(self._fleet.pods(model), self._loop.time())

    async def place(
        self, inbound: Inbound, exchange: Exchange, on_wait: Callable[[], None] = lambda: None
    ) -> frozenset[PodId]:
        """Wait until the request may go to a pod, and return the pods to avoid.

        `on_wait` is called if the request has to wait.

        Raises TooManyRequests if the request would wait too long, if it finds no place in the queue, or if it is
        sheddable and would have to wait. Raises Unavailable if there is no pod by then. A request that is cancelled
        here leaves the queue.
        """
        model, now_s = inbound.model, self._loop.time()
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line(self._limits.line)
        pods = self._fleet.pods(model)
        avoided: frozenset[PodId] | None = NO_PODS
        if pods:
            if self._limits.queue_s:
                avoided = line.passes(exchange.arrival.flow, inbound.priority, pods, now_s)
        elif self.wakes_models:
            avoided = None
        if avoided is not None and (inbound.ttft_slo_s is None or not pods):
            return avoided
        waiting = self._waiting(inbound, exchange.arrival, pods, now_s)
        if avoided is None and exchange.arrival.urgency.is_sheddable and pods:
            self._count(exchange.arrival.tenant.name, "shed")
            why = "every engine is busy, and the request's objective has a priority below 0"
            raise _overloaded(why, line.wait_s(waiting))
        wait_s = 0.0 if avoided is not None else line.wait_s(waiting)
        try:
            if inbound.ttft_slo_s is not None and pods:
                self._meet(inbound, inbound.ttft_slo_s, waiting, wait_s)
            elif pods and avoided is None:
                self._check_wait(line, waiting, inbound, exchange.arrival, wait_s)
        except _Refusal as refusal:
            self._count(exchange.arrival.tenant.name, refusal.reason)
            raise refusal.error from None
        if avoided is not None:
            return avoided
        on_wait()
        return await self._wait(line, waiting, inbound, exchange)

    def refuse_all(self) -> None:
        """Refuse all waiting requests, because the gateway stops."""
        for waiting in list(self._held):
            self._lines[self._held[waiting].inbound.model].leave(waiting, self._loop.time())
            error = Unavailable("the gateway stops: try again", code="stopping", retry_after_s=1.0)
            self._refuse(waiting, "stopping", error)

    def _waiting(self, inbound: Inbound, arrival: Arrival, pods: Sequence[Pod], now_s: float) -> Waiting:
        bound_s = self._limits.queue_s if pods else self._limits.activation_s
        deadline_s = min(arrival.arrived_s + bound_s, arrival.deadline_s)
        if inbound.ttft_slo_s is not None:
            deadline_s = min(deadline_s, arrival.arrived_s + inbound.ttft_slo_s)
        return Waiting(
            flow=arrival.flow,
            weight=arrival.tenant.weight,
            priority=inbound.priority,
            tokens=inbound.prompt_tokens + inbound.prompts * inbound.output_tokens,
            size=len(inbound.body) if inbound.upload is None else inbound.upload.held,
            arrived_s=arrival.arrived_s,
            deadline_s=deadline_s,
            session=inbound.session,
        )

    def _meet(self, inbound: Inbound, slo_s: float, waiting: Waiting, wait_s: float | None) -> None:
        """Move the wait's deadline so that the first token comes in time. Raises _Refusal if it cannot."""
        own_s = self._chooser.least_ttft_s(inbound)
        spent_s = self._loop.time() - waiting.arrived_s
        predicted_s = spent_s + WAIT_MARGIN * (wait_s or 0.0) + own_s
        if predicted_s > slo_s:
            raise _Hopeless(slo_s, predicted_s)
        waiting.deadline_s = min(waiting.deadline_s, waiting.arrived_s + slo_s - own_s - ROOM_S)

    def _check_wait(
        self, line: Line, waiting: Waiting, inbound: Inbound, arrival: Arrival, wait_s: float | None
    ) -> None:
        """Give a request that asks for no time its goal. Raises _Refusal if it would wait too long."""
        now_s = self._loop.time()
        if wait_s is not None and now_s + wait_s > waiting.deadline_s:
            raise _Late(wait_s)
        wanted_s = self._limits.goals.of(inbound.model, arrival.tenant.ttft_goal_s)
        waiting.goal = goal_of(self._chooser.least_ttft_s(inbound), wanted_s)
        if line.is_hopeless(waiting, now_s):
            raise _Standing(wait_s)

    async def _wait(self, line: Line, waiting: Waiting, inbound: Inbound, exchange: Exchange) -> frozenset[PodId]:
        placed: asyncio.Future[frozenset[PodId]] = self._loop.create_future()
        self._held[waiting] = _Held(inbound, exchange.arrival.tenant.name, placed)
        began_s = self._loop.time()
        for dropped in line.enter(waiting, began_s):
            wait_s = line.wait_s(dropped)
            is_last = dropped is waiting
            self._refuse(dropped, "full" if is_last else "shed", _overloaded("the queue is full", wait_s))
        self._look_soon(at_once=line.is_within_share(waiting, began_s))
        try:
            return await placed
        finally:
            now_s = self._loop.time()
            if self._held.pop(waiting, None) is not None:  # the client has left
                line.leave(waiting, now_s)
            exchange.waited(now_s - began_s)
            self._metrics.queue.waited(now_s - began_s)
            self._metrics.tenants.queued(exchange.arrival.tenant.name, now_s - began_s)

    def _look_soon(self, *, at_once: bool) -> None:
        """Schedule `_look`. `at_once`: do not wait for the next tick."""
        if at_once and isinstance(self._timer, asyncio.TimerHandle):
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Release waiting requests, one per model, so that each one's load is counted before the next look."""
        self._timer = None
        now_s = self._loop.time()
        has_let_go = False
        for model, line in self._lines.items():
            if not len(line):
                continue
            pods = self._fleet.pods(model)
            for gone in line.expired(now_s):
                self._expire(gone, model, pods, now_s)
            release = line.next(pods, now_s, self._patience_s)
            if release is not None:
                has_let_go = True
                placed = self._held.pop(release.request).placed
                if not placed.done():  # done if its client has left in this turn of the loop
                    placed.set_result(release.avoided)
        if self._held:
            # A released request runs up to where its pod counts it, before any callback that is scheduled from now on.
            self._timer = self._loop.call_soon(self._look) if has_let_go else self._loop.call_later(TICK_S, self._look)

    def _patience_s(self, waiting: Waiting, without_room: frozenset[PodId]) -> float:
        return self._chooser.patience_s(self._held[waiting].inbound, without_room)

    def _expire(self, waiting: Waiting, model: str, pods: Sequence[Pod], now_s: float) -> None:
        if not pods:
            self._refuse(waiting, "asleep", NoEngine(model, retry_after_s=SCALING_RETRY_AFTER_S))
            return
        slo_s = self._held[waiting].inbound.ttft_slo_s
        waited_s = now_s - waiting.arrived_s
        if slo_s is not None and waited_s + ROOM_S >= slo_s / 2:
            self._refuse(waiting, "slo", _Hopeless(slo_s, slo_s + waited_s).error)
        elif now_s < waiting.deadline_s:
            self._refuse(waiting, "standing", _Standing(waited_s).error)
        else:
            self._refuse(waiting, "late", _Late(waited_s).error)

    def _refuse(self, waiting: Waiting, reason: str, error: ApiError) -> None:
        held = self._held.pop(waiting)
        self._count(held.tenant, reason)
        if not held.placed.done():
            held.placed.set_exception(error)

    def _count(self, tenant: str, reason: str) -> None:
        self._metrics.queue.refused(reason)
        self._metrics.tenants.refused(tenant, "queue")


class _Refusal(Exception):
    """The request is refused and does not wait. `reason` is for metrics."""

    def __init__(self, reason: str, error: ApiError) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error


class _Late(_Refusal):
    def __init__(self, wait_s: float) -> None:
        super().__init__("late", _overloaded("every engine is busy, and too many requests wait", wait_s))


class _Standing(_Refusal):
    def __init__(self, wait_s: float | None) -> None:
        why = "more requests come than the engines can answer in time"
        super().__init__("standing", _overloaded(why, wait_s))


class _Hopeless(_Refusal):
    def __init__(self, slo_s: float, predicted_s: float) -> None:
        error = TooManyRequests(
            f"{headers.TTFT_SLO}: the first token would come after about {1000 * predicted_s:.0f} ms, "
            f"not within {1000 * slo_s:.0f} ms: try again later, or allow more",
            param=headers.TTFT_SLO,
            code="slo",
            retry_after_s=_retry_after_s(predicted_s - slo_s),
        )
        super().__init__("slo", error)


def _overloaded(why: str, wait_s: float | None) -> TooManyRequests:
    return TooManyRequests(f"{why}: try again later", code="overloaded", retry_after_s=_retry_after_s(wait_s))


def _retry_after_s(wait_s: float | None) -> float:
    return 1.0 if wait_s is None else min(max(1.0, wait_s), LONGEST_RETRY_AFTER_S)
