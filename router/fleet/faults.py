"""Ejects a pod that fails requests. After a while, tries it again with one request at a time.

A broken engine answers 500 at once while its probes succeed. So it looks idle and fast, and would attract every
request. Pure: every time is seconds of one monotonic clock, passed in.

    IN -- failures in a row --> OUT -- the ejection is over, a probe is answered --> ON_TRIAL -- a request --> TRIED
    TRIED --> IN if the request gets its whole answer, OUT for longer if it fails, otherwise ON_TRIAL again

A pod may itself say that it takes no more requests, as a draining vLLM does. It is out as soon as it says so, and is
tried like an ejected pod. But leaving is no failure, and the pod is not used even if no other pod is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

FIRST_EJECTION_S = 5.0
LONGEST_EJECTION_S = 60.0
"""An ejection soon after another lasts twice as long, up to this. A trial costs at most one retry of one request, so it
may come soon."""
FIRST_LEAVE_S = 15.0
"""Seconds for which a pod that says that it leaves is out; then twice as long, up to LONGEST_EJECTION_S. A draining pod
does not come back before it restarts, so the trial only serves in case the answer was misunderstood."""
AT_WORK_S = 5.0
"""If a pod refuses requests within these seconds after an answer began, it counts as full, not as broken. If it leaves
a probe unanswered within these seconds after an answer began or ended, it counts as busy, not as dead."""
BREAKS_LAST_S = 600.0
"""Seconds for which a broken stream counts: a proxy that cuts streams may do so minutes apart."""
MOST_COUNTED = 1000
"""Failures in a row that are counted; more make no difference."""


class Standing(Enum):
    """Whether a pod gets requests, judged by its answers to earlier ones."""

    IN = auto()
    OUT = auto()
    ON_TRIAL = auto()
    """Its time out is over: the next request is a trial."""
    TRIED = auto()
    """The request of the trial is under way, and no other is sent there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A request that a pod failed. `body` tells requests apart; `is_made_good`: another pod has answered the
    request."""

    body: int
    sent_s: float
    failed_s: float
    is_made_good: bool = False


@dataclass(slots=True)
class Streak:
    """Failures of one kind in a row. `count` leaves out requests that were sent before the last counted failure.

    Requests under way when a failure is found belong to the same event: an engine fails all requests of a step, and a
    network fails all connections. If the same body fails again and no other does, the body may be at fault.
    """

    count: int = 0
    _bodies: set[int] = field(default_factory=set)
    _known_s: float = float("-inf")

    def add(self, fault: Fault) -> None:
        """Count one more failure."""
        if fault.sent_s < self._known_s or (fault.body in self._bodies and not fault.is_made_good):
            return
        if self.count == MOST_COUNTED:
            return
        self._known_s = fault.failed_s
        self._bodies.add(fault.body)
        self.count += 1

    def end(self) -> None:
        """Note that a request went well."""
        if self.count:
            self.count = 0
            self._bodies.clear()


class Faults:
    """The record of one pod since its last start."""

    __slots__ = (
        "_began_s",
        "_broke_s",
        "_broken",
        "_ended_s",
        "_errors",
        "_is_leaving",
        "_is_suspect",
        "_length_s",
        "_out_s",
        "_standing",
        "_until_s",
    )

    def __init__(self) -> None:
        self._standing = Standing.IN
        self._is_suspect = False
        self._is_leaving = False
        self._errors = Streak()
        """Requests that failed before the first byte of an answer."""
        self._broken = Streak()
        """Streams that broke after the first byte."""
        self._began_s = self._ended_s = float("-inf")
        """When an answer last began well, and when one last ended well."""
        self._broke_s = float("-inf")
        """When a stream last broke."""
        self._out_s = self._until_s = float("-inf")
        """When the pod was last ejected, and the earliest time at which that ends or ended."""
        self._length_s = 0.0
        """Length of the last ejection, in seconds."""

    @property
    def standing(self) -> Standing:
        """The pod's standing; only the methods of this class change it."""
        return self._standing

    @property
    def began_s(self) -> float:
        """When the pod last began an answer well."""
        return self._began_s

    @property
    def count(self) -> int:
        """Failures in a row."""
        return max(self._errors.count, self._broken.count)

    @property
    def is_ejected(self) -> bool:
        """Whether the pod gets no requests, except for a trial, because it fails them."""
        return self._standing is not Standing.IN and not self._is_leaving

    @property
    def is_leaving(self) -> bool:
        """Whether the pod gets no requests, except for a trial, because it has said that it takes none."""
        return self._standing is not Standing.IN and self._is_leaving

    @property
    def is_out(self) -> bool:
        """Whether the pod gets no requests at the moment."""
        return self._standing in (Standing.OUT, Standing.TRIED)

    @property
    def is_doubtful(self) -> bool:
        """Whether the pod is unfit for a second attempt: it has failed a request since it last answered one."""
        return self._is_suspect or self._standing is not Standing.IN

    def has_broken(self, now_s: float) -> bool:
        """Return whether the pod broke a stream in the last minutes."""
        return now_s - self._broke_s < BREAKS_LAST_S

    def is_at_work(self, now_s: float) -> bool:
        """Return whether the pod began an answer lately."""
        return now_s - self._began_s < AT_WORK_S

    def was_heard(self, now_s: float) -> bool:
        """Return whether the pod began an answer lately, or ended one well."""
        return now_s - max(self._began_s, self._ended_s) < AT_WORK_S

    def began(self, now_s: float) -> None:
        """Note that a request got the first byte of its answer."""
        self._began_s = now_s
        self._is_suspect = False
        self._errors.end()

    def ended(self, *, sent_s: float, now_s: float) -> bool:
        """Note that a request got its whole answer. True: the pod has passed its trial.

        This does not end a row of errors: running requests may go on while the pod begins no new ones.
        """
        self._ended_s = now_s
        self._broken.end()
        if self._standing is Standing.IN or sent_s < self._out_s:
            return False
        self._standing, self._until_s = Standing.IN, now_s
        return True

    def doubt(self) -> None:
        """Note that a request failed here. The second attempt elsewhere shows whether the pod is at fault."""
        self._is_suspect = True

    def failed(self, fault: Fault, *, is_begun: bool) -> None:
        """Note that a request failed through this pod's fault. `is_begun`: after the first byte of its answer."""
        if is_begun:
            self._broke_s = fault.failed_s
        if fault.failed_s >= (self._ended_s if is_begun else self._began_s):
            (self._broken if is_begun else self._errors).add(fault)

    def may_be_ejected(self, fault: Fault, eject_after: int) -> bool:
        """Return whether the failures up to `fault` are enough to eject the pod. In a trial one failure is enough."""
        if self._standing is Standing.IN:
            return self.count >= eject_after
        return fault.sent_s >= self._until_s

    def eject(self, now_s: float) -> float:
        """Eject the pod, and return for how many seconds: twice as long as before if the last ejection is recent."""
        is_soon = self.is_ejected or now_s - self._until_s <= self._length_s
        self._length_s = min(2 * self._length_s, LONGEST_EJECTION_S) if is_soon else 0.0
        self._length_s = self._length_s or FIRST_EJECTION_S
        self._is_leaving = False
        self._out_s, self._until_s = now_s, now_s + self._length_s
        if self._standing is not Standing.TRIED:  # if it is TRIED, the trial's request has yet to end
            self._standing = Standing.OUT
        return self._length_s

    def leave(self, now_s: float) -> bool:
        """Note that the pod says that it takes no more requests. True: this is new."""
        if self.is_leaving and self._standing is Standing.OUT:
            return False  # other requests under way get the same answer
        is_again = self.is_leaving
        self._length_s = min(2 * self._length_s, LONGEST_EJECTION_S) if is_again else FIRST_LEAVE_S
        self._is_leaving = True
        self._out_s, self._until_s = now_s, now_s + self._length_s
        if self._standing is not Standing.TRIED:
            self._standing = Standing.OUT
        return True

    def try_again(self, now_s: float) -> bool:
        """Note that the pod answers its probe. True: it may be tried with a request."""
        if self._standing is not Standing.OUT or now_s < self._until_s:
            return False
        self._standing = Standing.ON_TRIAL
        return True

    def begin_trial(self) -> bool:
        """Note that a request is sent to the pod. True: it is a trial, and no other request is sent before
        `end_trial`."""
        if self._standing is not Standing.ON_TRIAL:
            return False
        self._standing = Standing.TRIED
        return True

    def end_trial(self) -> None:
        """Note that the trial's request is over. If it has shown nothing, there is another trial."""
        if self._standing is Standing.TRIED:
            self._standing = Standing.OUT
