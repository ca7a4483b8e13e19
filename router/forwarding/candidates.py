"""Find the pods that a request may go to, with room, with its conversation, and able to answer its path; choose one."""

from __future__ import annotations

from collections.abc import Callable, Set

from engine.contract.errors import ApiError, TooManyRequests, Unavailable, quoted
from router.choosing.chooser import Choice, Chooser
from router.edge.errors import RETRY_AFTER_S
from router.engines.attempt_result import Cause
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.forwarding.exchange import Exchange
from router.forwarding.waiting import WaitingRoom
from router.reading.inbound import Inbound
from router.views.types import PodId

LACK_TTL_S = 60.0
"""For this time a pod that does not know a path gets no requests for that path. Later it may run another release."""
MAX_LACKS = 4096
"""Most pairs of pod and path that are remembered, including paths that clients invent."""
_NONE: frozenset[PodId] = frozenset()


class NoSuchPath(ApiError):
    """404: no engine of the model answers requests of this kind."""

    status = 404
    type = "invalid_request_error"


class Candidates:
    """Decides where a request may go. It learns from a pod's answers which paths the pod does not know."""

    def __init__(self, fleet: Fleet, room: WaitingRoom, chooser: Chooser, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._room = room
        self._chooser = chooser
        self._clock = clock
        self._lacks: dict[tuple[PodId, str], float] = {}
        """Pods and the paths they lack, with the time until which this holds, oldest first."""

    async def place(
        self, inbound: Inbound, exchange: Exchange, on_wait: Callable[[], None] = lambda: None
    ) -> Set[PodId]:
        """Wait until a pod may take the request, and return the pods to avoid. `on_wait`: see `WaitingRoom`.

        Raises NoSuchPath, and what `WaitingRoom.place` raises.
        """
        if inbound.only is not None:
            return self._all_but(inbound, inbound.only)
        out = await self._room.place(inbound, exchange, on_wait)
        if not self._lacks:
            return out
        lacking = self.lacking(inbound)
        if not lacking:
            return out
        pods = {pod.pod_id for pod in self._fleet.pods(inbound.model)}
        able = pods - lacking
        if pods and not able:
            raise NoSuchPath(
                f"no engine of model {quoted(inbound.model)} answers {quoted(inbound.endpoint)}", code="unknown_path"
            )
        return out | lacking if able - out else lacking  # if all able pods are full, one of them queues it

    async def first(self, exchange: Exchange, inbound: Inbound, on_wait: Callable[[], None]) -> Choice:
        """Choose the pod for a request's first attempt. Raises as `place`, and NoEngine."""
        return self._chooser.choose(inbound, await self.place(inbound, exchange, on_wait))

    async def next(self, exchange: Exchange, inbound: Inbound, on_wait: Callable[[], None]) -> Choice | None:
        """Choose a pod for the next attempt of a request that has failed; None if there is none.

        The request waits if every pod is full and so was the last one tried, or if no pod is left. A request bound to
        one pod, and an upload that cannot be sent again from its beginning, get no further attempt.
        """
        if inbound.only is not None or (inbound.upload is not None and not inbound.upload.is_replayable):
            return None
        tried = self.lacking(inbound) | {attempt.pod.pod_id for attempt in exchange.attempts}
        full = self._room.full(inbound.model)
        was_full = exchange.attempts[-1].cause is Cause.FULL
        try:
            if (full is None and was_full) or not self._fleet.pods(inbound.model):
                return await self.first(exchange, inbound, on_wait)
            avoided = tried | (full or set())
            if not was_full and all(pod.pod_id in avoided for pod in self._fleet.pods(inbound.model)):
                avoided = tried  # all others are full: one of them queues the request
            return self._chooser.choose(inbound, self.to_avoid(inbound, avoided))
        except (NoSuchPath, TooManyRequests, Unavailable):
            return None

    def has_untried(self, exchange: Exchange, inbound: Inbound) -> bool:
        """Return whether some pod of the model has not been asked."""
        pods, attempts = self._fleet.pods(inbound.model), exchange.attempts
        if len(pods) > len(attempts):
            return True
        tried = {attempt.pod.pod_id for attempt in attempts}
        return any(pod.pod_id not in tried for pod in pods)

    def has_free(self, exchange: Exchange, inbound: Inbound, most: float) -> bool:
        """Return whether a pod that was not asked has at most `most` requests of this gateway."""
        tried = {attempt.pod.pod_id for attempt in exchange.attempts}
        pods = self._fleet.pods(inbound.model)
        return any(pod.pod_id not in tried and pod.in_flight <= most for pod in pods)

    def to_avoid(self, inbound: Inbound, tried: Set[PodId]) -> Set[PodId]:
        """Return `tried` and, for a retry, the pods in doubt. If that leaves no pod, return only `tried`.

        If n pods are broken, at most n requests fail at two pods each: after that, all broken pods but one are in
        doubt.
        """
        if not tried:
            return tried
        avoided = tried | self._fleet.doubtful(inbound.model)
        return avoided if any(pod.pod_id not in avoided for pod in self._fleet.pods(inbound.model)) else tried

    def _all_but(self, inbound: Inbound, pod_id: PodId) -> Set[PodId]:
        others = {pod.pod_id for pod in self._fleet.pods(inbound.model)}
        if pod_id not in others:
            raise Unavailable(
                "the engine with the conversation takes no more requests: try again, or send the whole conversation",
                code="no_engine",
                retry_after_s=RETRY_AFTER_S,
            )
        return others - {pod_id}

    def lacks(self, pod: Pod, inbound: Inbound) -> None:
        """Record that the pod says that it does not know the path of the request, unless it has answered it before."""
        if inbound.endpoint in pod.answered:
            return
        key = (pod.pod_id, inbound.endpoint)
        self._lacks.pop(key, None)
        self._lacks[key] = self._clock() + LACK_TTL_S
        if len(self._lacks) > MAX_LACKS:
            del self._lacks[next(iter(self._lacks))]

    def lacking(self, inbound: Inbound) -> Set[PodId]:
        """Return the pods that recently did not know the path."""
        if not self._lacks:
            return _NONE
        now_s = self._clock()
        while self._lacks and next(iter(self._lacks.values())) <= now_s:
            del self._lacks[next(iter(self._lacks))]
        path = inbound.endpoint
        return frozenset(pod_id for pod_id, lacked in self._lacks if lacked == path)
