"""The requests that wait for the pods of one model: which must wait, which is next, and how long they wait.

Pure: every time is seconds of one monotonic clock, passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.overload.flow import Waiting
from router.overload.full import FullPods
from router.overload.queue import FairQueue
from router.overload.saturation import (
    CONTENDED_S,
    RESERVED,
    ROOM_S,
    SATURATED_S,
    SPARING_ROOM_S,
    Place,
    has_room,
    is_saturated,
)
from router.overload.shares import Shares
from router.overload.standing import Standing
from router.views.types import PodId

LOOKED_AT = 8
"""Requests at the head of the queue that are offered a pod with room: each offer costs about as much as a decision of
the policy."""
PATIENCE_S = 0.25
"""Longest time that a request at the head waits for the pod that suits it, while the pods with room suit others further
back."""
TIGHT_S = 1.0
"""After the queue is empty, requests are let go as carefully as before for this long. Otherwise each moment without a
queue would fill the pods' own queues, which would delay the requests that come next."""
CONTENDED_FOR_S = 10.0
"""If a request follows one of another tenant or priority, several come together: for this many seconds, CONTENDED_S is
the limit in place of SATURATED_S."""
RATE_HALF_LIFE_S = 5.0
WAIT_MARGIN = 1.1
"""A predicted wait is multiplied by this before it is compared with the time to the first token that is wanted, because
more requests that go first may still come."""
TICK_S = 0.005
"""How often the owner of a line checks whether a request may go: time alone can give pods room."""


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Bounds of each model's queue. `pod_requests`: the most requests of all gateways that a pod gets at once; 0: as
    many as it takes."""

    requests: int
    bytes: int
    pod_requests: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """A request that is let go, to a pod that is not in `avoided`."""

    request: Waiting
    avoided: frozenset[PodId]


class Drain:
    """Tokens a second at which the queue empties while requests wait; older tokens count less."""

    __slots__ = ("_at_s", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._at_s = math.inf
        """When it was last updated; infinite: nothing waits."""

    def goes_on(self, now_s: float) -> None:
        """Note that requests wait, now and since the last call."""
        passed_s = max(0.0, now_s - self._at_s)
        fade = 0.5 ** (passed_s / RATE_HALF_LIFE_S)
        self._tokens *= fade
        self._seconds = self._seconds * fade + passed_s
        self._at_s = now_s

    def stops(self) -> None:
        """Note that nothing waits any more."""
        self._at_s = math.inf

    def let_go(self, tokens: int) -> None:
        """Note that a request of `tokens` tokens was sent."""
        self._tokens += tokens

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None while too little was seen."""
        return self._tokens / self._seconds if self._tokens and self._seconds >= 1.0 else None


class Line:
    """The queue of one model. A request either passes at once, or enters and then is let go, expires or leaves."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._queue = FairQueue(limits.requests, limits.bytes)
        self._drain = Drain()
        self._shares = Shares()
        self._standing = Standing()
        self._tight_until_s = -math.inf
        self._last = ("", 0)
        """Flow and priority of the last request."""
        self._contended_until_s = -math.inf
        """Until then, CONTENDED_S is the limit in place of SATURATED_S."""
        self._full = FullPods(limits.pod_requests)
        self._had_room = 0
        """Index of the pod that was last found to have room: the next search begins there."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def size(self) -> int:
        """Bytes of the waiting bodies."""
        return self._queue.size

    def passes(self, flow: str, priority: int, pods: Sequence[Place], now_s: float) -> frozenset[PodId] | None:
        """Return the pods that a request must avoid if it may go at once; None: it has to wait.

        `pods`, here and below: the model's pods, in a sequence that never changes. If few pods have changed since the
        last request, the cost does not depend on their number.
        """
        if flow != self._last[0] or priority != self._last[1]:
            self._last = flow, priority
            self._contended_until_s = now_s + CONTENDED_FOR_S
        if self._queue or now_s < self._tight_until_s:
            return None
        limit_s = CONTENDED_S if now_s < self._contended_until_s else SATURATED_S
        full, count = self._full.at(pods, now_s), len(pods)
        for step in range(count):
            place = (self._had_room + step) % count
            if not is_saturated(pods[place], limit_s, now_s) and pods[place].pod_id not in full:
                self._had_room = place
                return full
        return None

    def without_room(self, pods: Sequence[Place], now_s: float) -> frozenset[PodId] | None:
        """Return the pods that take no further request; None: no pod takes one. For a second attempt, which does not
        queue."""
        full = self._full.at(pods, now_s)
        return None if len(full) == len(pods) else full

    def busy(self, pods: Sequence[Place], now_s: float) -> frozenset[PodId] | None:
        """Return the full or contended pods, for an optional request; None: requests wait, or did lately."""
        if self._queue or now_s < self._tight_until_s:
            return None
        contended = [pod.pod_id for pod in pods if is_saturated(pod, CONTENDED_S, now_s)]
        return self._full.at(pods, now_s).union(contended)

    def enter(self, request: Waiting, now_s: float) -> list[Waiting]:
        """Let a request wait. Return the requests that are given up for it; only `request` itself if there is no
        place."""
        self._drain.goes_on(now_s)
        dropped = self._queue.push(request)
        self._note(now_s)
        return dropped

    def leave(self, request: Waiting, now_s: float) -> None:
        """Remove a request that no longer waits and is not let go."""
        self._drain.goes_on(now_s)
        self._queue.remove(request)
        self._note(now_s)

    def expired(self, now_s: float) -> list[Waiting]:
        """Remove and return the requests that have waited for too long."""
        self._drain.goes_on(now_s)
        gone = self._queue.expired(now_s)
        if (first := next(self._queue.order(), None)) is not None and self._standing.lasts(first.goal, now_s):
            gone += self._too_late(now_s)
        for request in gone:
            self._standing.left(now_s - request.arrived_s, request.goal, now_s)
        self._note(now_s)
        return gone

    def is_hopeless(self, request: Waiting, now_s: float) -> bool:
        """Return whether a request that comes now would get its first token too late, in a queue that stands."""
        if not self._standing.lasts(request.goal, now_s):
            return False
        spent_s = now_s - request.arrived_s
        return spent_s + WAIT_MARGIN * (self.wait_s(request) or 0.0) > request.goal.longest_wait_s

    def _too_late(self, now_s: float) -> list[Waiting]:
        """Remove and return the requests of a standing queue that have waited too long for their goals."""
        late = [each for each in self._queue.order() if now_s - each.arrived_s > each.goal.longest_wait_s]
        for request in late:
            self._queue.remove(request)
        return late

    def next(
        self, pods: Sequence[Place], now_s: float, patience_s: Callable[[Waiting, frozenset[PodId]], float]
    ) -> Release | None:
        """Remove and return the next request that may go; None: there is none.

        `patience_s(request, avoided)`: how long the request should wait for a pod in `avoided` before it goes
        elsewhere. Among the first few requests, the first that need not wait goes, so that caches are used no less
        than without a queue.

        A flow within its share is not held while any pod takes a request from it. The other flows leave some room for
        it, while there is such a flow.
        """
        if not self._queue:
            return None
        spared = self._queue.first_of(lambda flow: self._shares.is_within(flow, now_s))
        if spared is not None:
            avoided = self._without_room(pods, now_s, CONTENDED_S)
            return None if len(avoided) == len(pods) else self._let_go(spared, avoided, now_s)
        if self._shares.are_uneven(now_s):
            avoided = self._without_room(pods, now_s, SPARING_ROOM_S, RESERVED)
        else:
            avoided = self._without_room(pods, now_s, ROOM_S)
        if len(avoided) == len(pods):
            return None
        for place, request in enumerate(self._queue.order()):
            if place == LOOKED_AT:
                return None
            waits_s = patience_s(request, avoided) if avoided else 0.0
            if waits_s > 0:
                if request.looked_s is None:
                    request.looked_s = now_s
                if now_s - request.looked_s < min(waits_s, PATIENCE_S):
                    continue
            break
        else:
            return None
        return self._let_go(request, avoided, now_s)

    def is_within_share(self, request: Waiting, now_s: float) -> bool:
        """Return whether the flow of `request` takes less than another at the moment: then it need not wait for a
        tick."""
        return self._shares.is_within(request.flow, now_s)

    def wait_s(self, request: Waiting) -> float | None:
        """Return the seconds that `request` would wait if it entered now; None: not known yet."""
        if not self._queue:
            return 0.0
        rate = self._drain.tokens_per_s
        return None if rate is None else self._queue.tokens_before(request) / rate

    def _without_room(
        self, pods: Sequence[Place], now_s: float, room_s: float, reserved: float = 0.0
    ) -> frozenset[PodId]:
        most = self._limits.pod_requests
        return frozenset(pod.pod_id for pod in pods if not has_room(pod, most, now_s, room_s, reserved))

    def _let_go(self, request: Waiting, avoided: frozenset[PodId], now_s: float) -> Release:
        self._drain.goes_on(now_s)
        self._drain.let_go(request.tokens)
        self._shares.let_go(request.flow, request.tokens / request.weight, now_s)
        self._queue.serve(request)
        self._standing.left(now_s - request.arrived_s, request.goal, now_s)
        self._note(now_s)
        return Release(request, avoided)

    def _note(self, now_s: float) -> None:
        self._tight_until_s = now_s + TIGHT_S
        if not self._queue:
            self._drain.stops()
            self._standing.emptied()
