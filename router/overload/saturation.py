"""Whether a pod has room, from what is known of it. Pure: every time is seconds of one monotonic clock, passed in."""

from __future__ import annotations

from typing import Protocol

from engine.contract.load import LoadReport
from router.views.pod_state import PodState
from router.views.types import PodId

SATURATED_S = 1.5
"""A pod is saturated if it has more queued prefill than this, or if its reports have said for this long that requests
wait. This is far above what a fleet below saturation shows on all of its pods at once. It is also above a burst of 128
requests a pod: holding those back would cost time."""
CONTENDED_S = 0.25
"""The same limit while requests of several tenants or priorities come: in a pod's own queue they would wait first come,
first served. At 0.9 of the knee, eight pods never all have a tenth of a second queued at once."""
SATURATED_REQUESTS = 2
"""Least number of requests without a first token in a saturated pod: one long prompt is no queue."""
ROOM_S = 0.05
"""While requests are held, the next goes to a pod with less queued prefill than this. That is enough for the pod's next
step, and so little that a more urgent request need not wait behind it."""
SPARING_ROOM_S = 0.04
"""The same for a tenant that takes more than another: then the step that computes the other's request is less full.
Less than a step of a full batch would leave pods idle."""
RESERVED = 1 / 16
"""Share of a pod's places that stay free for tenants that take less than others. Rounded down."""
BACKED_UP_S = 0.3
"""While requests are held, a pod has no room if its reports have said for this long that requests wait. Then its batch
or its KV blocks are all in use, which the queued prefill does not show. Engines report ten times a second."""
GROW_S = 1.0
"""Seconds after which a learnt cap is tried one higher; each failed try costs a request a second attempt."""
LATE_S = 0.2
"""If a first token is later than predicted by this many seconds, its request waits for something other than prefill."""
FORGET_S = 60.0
"""Seconds without a refusal after which a learnt cap is dropped."""


class Cap:
    """How many requests a pod takes at once, learnt from its behaviour.

    After a refusal (429, or 503 of a pod that answers other requests), the cap is the number of this gateway's requests
    that the pod had at that moment. It grows by one each second. From the pod's reports comes another cap, for all
    gateways together: the number of requests that run while other requests wait and are late. Being late shows that
    those wait not for prefill but for a place in the batch or KV blocks. This cap grows by one for each report in which
    it is reached and no request waits. (Additive increase as in Chiu and Jain, 1989; the decrease need not be
    multiplicative, because the pod shows the number.)
    """

    __slots__ = ("_at", "_batch", "_refused_s", "_watchers")

    def __init__(self) -> None:
        self._at: int | None = None
        self._refused_s = 0.0
        self._batch: int | None = None
        self._watchers: tuple[set[Cap], ...] = ()

    def watch(self, changed: set[Cap]) -> None:
        """Add this cap to `changed` whenever it is learnt; growing or being forgotten does not count."""
        self._watchers = (*self._watchers, changed)

    def unwatch(self, changed: set[Cap]) -> None:
        """Stop adding this cap to `changed`."""
        self._watchers = tuple(watcher for watcher in self._watchers if watcher is not changed)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.add(self)

    @property
    def is_known(self) -> bool:
        """Whether the pod has shown a cap."""
        return self._at is not None or self._batch is not None

    @property
    def batch(self) -> int | None:
        """Requests of all gateways that the pod runs at once; None: not known."""
        return self._batch

    def refused(self, others: int, now_s: float) -> None:
        """Note that the pod refused a request while it had `others` other requests of this gateway."""
        self._at = max(1, others)
        self._refused_s = now_s
        self._tell()

    def limit(self, now_s: float) -> int | None:
        """Return how many requests of this gateway the pod is believed to take at once; None: not known."""
        if self._at is None:
            return None
        since_s = now_s - self._refused_s
        if since_s >= FORGET_S:
            self._at = None
            return None
        return self._at + int(since_s / GROW_S)

    def reported(self, load: LoadReport, late_s: float) -> None:
        """Learn from a report of the pod. `late_s`: how late the oldest request without a first token is."""
        if load.waiting:
            if late_s >= LATE_S and load.running:
                self._batch = load.running
                self._tell()
        elif self._batch is not None and load.running >= self._batch:
            self._batch = load.running + 1
            self._tell()


class Place(Protocol):
    """A pod: see `router.fleet.pod.Pod`."""

    pod_id: PodId
    state: PodState
    cap: Cap
    in_flight: int
    """Requests of this gateway in flight."""


def is_full(pod: Place, most: int, now_s: float, reserved: float = 0.0) -> bool:
    """Return whether the pod has as many requests as it takes: the learnt cap, or `most` if that is not 0.

    `most` also counts other gateways' requests, if the pod reports them. `reserved`: the share of the places that stays
    free.
    """
    if pod.cap.is_known:
        limit = pod.cap.limit(now_s)
        if limit is not None and pod.in_flight >= limit - int(reserved * limit):
            return True
        batch = pod.cap.batch
        if batch is not None and pod.state.requests(now_s) >= batch - int(reserved * batch):
            return True
    return most > 0 and pod.state.requests(now_s) >= most - int(reserved * most)


def is_saturated(pod: Place, limit_s: float, now_s: float) -> bool:
    """Return whether a request sent now would wait longer than `limit_s`, and not only for one long prompt.

    The queued prefill is ignored while the pod's speed is not known: with a guess, a new fleet would hold back a burst.
    """
    state = pod.state
    is_queued = state.queue_s(now_s) > limit_s and state.knows_speed(now_s)
    if not is_queued and state.backed_up_s(now_s) <= limit_s:
        return False
    return state.waiting(now_s) >= SATURATED_REQUESTS


def has_room(pod: Place, most: int, now_s: float, room_s: float = ROOM_S, reserved: float = 0.0) -> bool:
    """Return whether a held request may go to the pod: it has less than `room_s` of work left, and takes one more."""
    state = pod.state
    if state.queue_s(now_s) >= room_s or state.backed_up_s(now_s) >= BACKED_UP_S:
        return False
    return not is_full(pod, most, now_s, reserved)
