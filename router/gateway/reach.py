"""Which pods a request may go to: with room, with what it goes on with, and with an answer to its path."""

from __future__ import annotations

from collections.abc import Callable, Set

import orjson
from aiohttp import web

from engine.contract.errors import ApiError, Unavailable, quoted
from router.fleet.fleet import Fleet
from router.gateway.exchange import Exchange
from router.gateway.inbound import RETRY_AFTER_S, Inbound
from router.gateway.waiting import WaitingRoom
from router.routing.types import PodId

LACK_TTL_S = 60.0
"""So long a pod is not asked for a path that it does not know. It may be another release by then, or more paths."""
MAX_LACKS = 4096
"""Pods and paths that are remembered; those of clients with paths of their own among them."""
_NONE: frozenset[PodId] = frozenset()


class NoSuchPath(ApiError):
    """404: no engine of the model answers requests of this kind."""

    status = 404
    type = "invalid_request_error"


def is_unknown_path(status: int, body: bytes) -> bool:
    """Whether an engine's error says that it does not know the path: not a model, nor anything else, that is missing.

    405, and 404 with the words of the servers that are known: FastAPI's `detail`, vLLM's and our own `Not Found` at the
    end of a message, or no JSON at all.
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
    """Where a request may go. Which paths a pod does not know is learnt from its answers."""

    def __init__(self, fleet: Fleet, room: WaitingRoom, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._room = room
        self._clock = clock
        self._lacks: dict[tuple[PodId, str], float] = {}
        """Until when, the oldest first."""

    async def place(self, request: web.Request, inbound: Inbound, exchange: Exchange) -> Set[PodId]:
        """Wait until a pod may take the request: one that is not among those returned.

        Raises NoSuchPath, and as `WaitingRoom.place`.
        """
        if inbound.only is not None:
            return self._all_but(inbound, inbound.only)
        out = await self._room.place(request, inbound, exchange)
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
        return out | lacking if able - out else lacking  # where all that are able are full, one of them queues it

    def _all_but(self, inbound: Inbound, pod_id: PodId) -> Set[PodId]:
        others = {pod.pod_id for pod in self._fleet.pods(inbound.model)}
        if pod_id not in others:
            raise Unavailable(
                "the engine that has the conversation takes no requests any more: try again, or send all of it",
                code="no_engine",
                retry_after_s=RETRY_AFTER_S,
            )
        return others - {pod_id}

    def lacks(self, pod_id: PodId, inbound: Inbound) -> None:
        """The pod does not know the path of the request."""
        key = (pod_id, inbound.endpoint)
        self._lacks.pop(key, None)
        self._lacks[key] = self._clock() + LACK_TTL_S
        if len(self._lacks) > MAX_LACKS:
            del self._lacks[next(iter(self._lacks))]

    def lacking(self, inbound: Inbound) -> Set[PodId]:
        """Pods that lately did not know the path."""
        if not self._lacks:
            return _NONE
        now_s = self._clock()
        while self._lacks and next(iter(self._lacks.values())) <= now_s:
            del self._lacks[next(iter(self._lacks))]
        path = inbound.endpoint
        return frozenset(pod_id for pod_id, lacked in self._lacks if lacked == path)
