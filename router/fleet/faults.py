"""What requests say of a pod: one that only fails them is ejected for a while, then tried with one request at a time.

An engine that is broken answers 500 at once and its probe well. It looks idle and fast for it, and would draw every
request. Pure: every time is seconds of one monotonic clock, passed in.

    taking requests -- failures in a row --> out -- its time is over, probe answered --> on trial -- a request --> tried

    tried: back, when the request gets the whole of its answer; out for longer, when it fails; else on trial once more
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_EJECTION_S = 5.0
LONGEST_EJECTION_S = 60.0
"""Ejections soon after one another double up to this. A trial costs one request a second attempt: it may come soon."""
AT_WORK_S = 5.0
"""Seconds after an answer began in which a pod that refuses others is taken to be full, not broken; and after one began
or ended in which a pod that lets a probe wait is taken to be busy, not dead."""
BREAKS_LAST_S = 600.0
"""Seconds for which it is remembered that a pod broke a stream: a proxy that cuts them may do so minutes apart."""
MOST_COUNTED = 1000
"""Failures in a row; more say no more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A request that a pod failed. `body` tells requests apart; `is_made_good`: another pod has answered this one."""

    body: int
    sent_s: float
    failed_s: float
    is_made_good: bool = False


@dataclass(slots=True)
class Streak:
    """Failures of one kind in a row. `count` is of different requests, one after the other.

    What was on its way when a failure came to light belongs to the same event: an engine fails all of a step together,
    and a network all connections. The same body again, failed by nobody else, says as much of the body as of the pod.
    """

    count: int = 0
    _bodies: set[int] = field(default_factory=set)
    _known_s: float = float("-inf")

    def add(self, fault: Fault) -> None:
        """One more failure."""
        if fault.sent_s < self._known_s or (fault.body in self._bodies and not fault.is_made_good):
            return
        if self.count == MOST_COUNTED:
            return
        self._known_s = fault.failed_s
        self._bodies.add(fault.body)
        self.count += 1

    def end(self) -> None:
        """A request went well."""
        if self.count:
            self.count = 0
            self._bodies.clear()


class Faults:
    """The record of one life of one pod."""

    __slots__ = (
        "_began_s",
        "_broke_s",
        "_broken",
        "_ended_s",
        "_errors",
        "_length_s",
        "_out_s",
        "_until_s",
        "is_on_trial",
        "is_suspect",
        "is_tried",
    )

    def __init__(self) -> None:
        self._errors = Streak()
        """Without a first byte of an answer."""
        self._broken = Streak()
        """Streams that broke after it."""
        self._began_s = self._ended_s = float("-inf")
        """When an answer last began well, and when one last ended well."""
        self._broke_s = float("-inf")
        """When a stream last broke."""
        self._out_s: float | None = None
        """When it was ejected; None: it is not."""
        self._until_s = float("-inf")
        self._length_s = 0.0
        """Seconds of the last ejection, which ended at `_until_s` at the earliest."""
        self.is_on_trial = False
        """Its time is over: the next request shows what it is worth."""
        self.is_tried = False
        """That request is under way."""
        self.is_suspect = False
        """It has failed a request since it last answered one: no place for a second attempt."""

    @property
    def count(self) -> int:
        """Failures in a row."""
        return max(self._errors.count, self._broken.count)

    @property
    def is_ejected(self) -> bool:
        """Whether it is to get no requests, but for that of a trial."""
        return self._out_s is not None

    @property
    def is_out(self) -> bool:
        """Whether it is to get none at the moment."""
        return self._out_s is not None and not self.is_on_trial

    def has_broken(self, now_s: float) -> bool:
        """Whether it broke a stream in the last minutes."""
        return now_s - self._broke_s < BREAKS_LAST_S

    def is_at_work(self, now_s: float) -> bool:
        """Whether it began an answer lately."""
        return now_s - self._began_s < AT_WORK_S

    def was_heard(self, now_s: float) -> bool:
        """Whether it began an answer lately, or ended one well."""
        return now_s - max(self._began_s, self._ended_s) < AT_WORK_S

    def began(self, now_s: float) -> None:
        """A request got the first byte of its answer."""
        self._began_s = now_s
        self.is_suspect = False
        self._errors.end()

    def ended(self, *, sent_s: float, now_s: float) -> bool:
        """A request got all of its answer. True: the pod has passed its trial by that.

        It says nothing of the errors that requests get meanwhile: what has begun may go on where nothing begins.
        """
        self._ended_s = now_s
        self._broken.end()
        if self._out_s is None or sent_s < self._out_s:
            return False
        self._out_s, self._until_s, self.is_on_trial = None, now_s, False
        return True

    def failed(self, fault: Fault, *, is_begun: bool) -> None:
        """A request failed by this pod's fault. `is_begun`: after the first byte of its answer."""
        if is_begun:
            self._broke_s = fault.failed_s
        if fault.failed_s >= (self._ended_s if is_begun else self._began_s):
            (self._broken if is_begun else self._errors).add(fault)

    def may_be_ejected(self, fault: Fault, eject_after: int) -> bool:
        """Whether its failures, of which `fault` is the last, are enough: the one of a trial is."""
        if self._out_s is None:
            return self.count >= eject_after
        return fault.sent_s >= self._until_s

    def eject(self, now_s: float) -> float:
        """Out, for so many seconds: twice as long as before where that was no longer ago than it had lasted."""
        is_soon = self._out_s is not None or now_s - self._until_s <= self._length_s
        self._length_s = min(2 * self._length_s, LONGEST_EJECTION_S) if is_soon else 0.0
        self._length_s = self._length_s or FIRST_EJECTION_S
        self._out_s, self._until_s, self.is_on_trial = now_s, now_s + self._length_s, False
        return self._length_s

    def try_again(self, now_s: float) -> bool:
        """The pod answers its probe. True: it may be tried with a request."""
        if self._out_s is None or self.is_on_trial or self.is_tried or now_s < self._until_s:
            return False
        self.is_on_trial = True
        return True
