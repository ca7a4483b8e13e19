"""Find the pods that a request may go to: with room, with its conversation, and with support for its path."""

from __future__ import annotations

from collections.abc import Callable, Set

import orjson

from engine.contract.errors import ApiError, Unavailable, quoted
from router.edge.errors import RETRY_AFTER_S
from router.fleet.fleet import Fleet
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


def is_unknown_path(status: int, body: bytes) -> bool:
    """Whether an engine's error says that the path is unknown, and not that a model or anything else is missing.

    That is 405, or 404 with the text of a known server: FastAPI's `detail`, a message that ends with `Not Found` (vLLM
    and our own engine), or no JSON at all.
    """
    if status != 404:
        return status == 405
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True
    if not isinstance(said, dict):
        return False
    error = said.get("error")
    words = said.get("detail", said.get("message")) if error is None else error
    if isinstance(words, dict):
        words = words.get("message")
    return isinstance(words, str) and words.endswith("Not Found")


class Reach:
    """Decides where a request may go. It learns from a pod's answers which paths the pod does not know."""

    def __init__(self, fleet: Fleet, room: WaitingRoom, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._room = room
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

    def _all_but(self, inbound: Inbound, pod_id: PodId) -> Set[PodId]:
        others = {pod.pod_id for pod in self._fleet.pods(inbound.model)}
        if pod_id not in others:
            raise Unavailable(
                "the engine with the conversation takes no more requests: try again, or send the whole conversation",
                code="no_engine",
                retry_after_s=RETRY_AFTER_S,
            )
        return others - {pod_id}

    def lacks(self, pod_id: PodId, inbound: Inbound) -> None:
        """Record that the pod does not know the path of the request."""
        key = (pod_id, inbound.endpoint)
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
