"""What requests say of a pod: one that only fails them is ejected for a while, then tried with one request at a time.

An engine that is broken answers 500 at once and its probe well. It looks idle and fast for it, and would draw every
request. Pure: every time is seconds of one monotonic clock, passed in.

    IN -- failures in a row --> OUT -- its time is over, probe answered --> ON_TRIAL -- a request --> TRIED

A pod may say itself that it takes nothing more, as a vLLM does that drains: it is out at its first word, and is tried
as one that was ejected. But that is no failure, and the pod is not used for want of others.

    TRIED: IN, when the request gets the whole of its answer; OUT for longer, when it fails; else ON_TRIAL once more
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

FIRST_EJECTION_S = 5.0
LONGEST_EJECTION_S = 60.0
"""Ejections soon after one another double up to this. A trial costs one request a second attempt: it may come soon."""
FIRST_LEAVE_S = 15.0
"""For so long a pod is out that says that it leaves; then twice as long, up to LONGEST_EJECTION_S. What drains does not
come back in this life: a trial is for what was misunderstood."""
AT_WORK_S = 5.0
"""Seconds after an answer began in which a pod that refuses others is taken to be full, not broken; and after one began
or ended in which a pod that lets a probe wait is taken to be busy, not dead."""
BREAKS_LAST_S = 600.0
"""Seconds for which it is remembered that a pod broke a stream: a proxy that cuts them may do so minutes apart."""
MOST_COUNTED = 1000
"""Failures in a row; more say no more."""


class Standing(Enum):
    """Whether a pod gets requests, as far as its answers to others say."""

    IN = auto()
    OUT = auto()
    ON_TRIAL = auto()
    """Its time out is over: the next request shows what it is worth."""
    TRIED = auto()
    """That request is under way, and no other is sent there."""


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
        """Without a first byte of an answer."""
        self._broken = Streak()
        """Streams that broke after it."""
        self._began_s = self._ended_s = float("-inf")
        """When an answer last began well, and when one last ended well."""
        self._broke_s = float("-inf")
        """When a stream last broke."""
        self._out_s = self._until_s = float("-inf")
        """When it was last ejected, and when that is over at the earliest, or was over."""
        self._length_s = 0.0
        """Seconds of the last ejection."""

    @property
    def standing(self) -> Standing:
        """Its methods alone change it."""
        return self._standing

    @property
    def began_s(self) -> float:
        """When it last began an answer well."""
        return self._began_s

    @property
    def count(self) -> int:
        """Failures in a row."""
        return max(self._errors.count, self._broken.count)

    @property
    def is_ejected(self) -> bool:
        """Whether it is to get no requests, but for that of a trial, as it fails them."""
        return self._standing is not Standing.IN and not self._is_leaving

    @property
    def is_leaving(self) -> bool:
        """Whether it is to get no requests, but for that of a trial, as it has said that it takes none."""
        return self._standing is not Standing.IN and self._is_leaving

    @property
    def is_out(self) -> bool:
        """Whether it is to get none at the moment."""
        return self._standing in (Standing.OUT, Standing.TRIED)

    @property
    def is_doubtful(self) -> bool:
        """Whether it is no place for a second attempt: it has failed a request since it last answered one."""
        return self._is_suspect or self._standing is not Standing.IN

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
        self._is_suspect = False
        self._errors.end()

    def ended(self, *, sent_s: float, now_s: float) -> bool:
        """A request got all of its answer. True: the pod has passed its trial by that.

        It says nothing of the errors that requests get meanwhile: what has begun may go on where nothing begins.
        """
        self._ended_s = now_s
        self._broken.end()
        if self._standing is Standing.IN or sent_s < self._out_s:
            return False
        self._standing, self._until_s = Standing.IN, now_s
        return True

    def doubt(self) -> None:
        """A request failed here. Whether by this pod's fault, its second attempt elsewhere shows."""
        self._is_suspect = True

    def failed(self, fault: Fault, *, is_begun: bool) -> None:
        """A request failed by this pod's fault. `is_begun`: after the first byte of its answer."""
        if is_begun:
            self._broke_s = fault.failed_s
        if fault.failed_s >= (self._ended_s if is_begun else self._began_s):
            (self._broken if is_begun else self._errors).add(fault)

    def may_be_ejected(self, fault: Fault, eject_after: int) -> bool:
        """Whether its failures, of which `fault` is the last, are enough: the one of a trial is."""
        if self._standing is Standing.IN:
            return self.count >= eject_after
        return fault.sent_s >= self._until_s

    def eject(self, now_s: float) -> float:
        """Out, for so many seconds: twice as long as before where that was no longer ago than it had lasted."""
        is_soon = self.is_ejected or now_s - self._until_s <= self._length_s
        self._length_s = min(2 * self._length_s, LONGEST_EJECTION_S) if is_soon else 0.0
        self._length_s = self._length_s or FIRST_EJECTION_S
        self._is_leaving = False
        self._out_s, self._until_s = now_s, now_s + self._length_s
        if self._standing is not Standing.TRIED:  # where it is, the request of the trial has yet to end
            self._standing = Standing.OUT
        return self._length_s

    def leave(self, now_s: float) -> bool:
        """It says that it takes nothing more. True: that is news."""
        if self.is_leaving and self._standing is Standing.OUT:
            return False  # others that were on their way hear the same
        is_again = self.is_leaving
        self._length_s = min(2 * self._length_s, LONGEST_EJECTION_S) if is_again else FIRST_LEAVE_S
        self._is_leaving = True
        self._out_s, self._until_s = now_s, now_s + self._length_s
        if self._standing is not Standing.TRIED:
            self._standing = Standing.OUT
        return True

    def try_again(self, now_s: float) -> bool:
        """The pod answers its probe. True: it may be tried with a request."""
        if self._standing is not Standing.OUT or now_s < self._until_s:
            return False
        self._standing = Standing.ON_TRIAL
        return True

    def begin_trial(self) -> bool:
        """A request is sent there. True: it is the one of a trial, and there is no other before `end_trial`."""
        if self._standing is not Standing.ON_TRIAL:
            return False
        self._standing = Standing.TRIED
        return True

    def end_trial(self) -> None:
        """That request is over. Where it has shown nothing, there is another trial."""
        if self._standing is Standing.TRIED:
            self._standing = Standing.OUT
