"""What became of a request at a pod, and what follows from it: the one table of both."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Outcome(Enum):
    """What became of an attempt."""

    ANSWERED = auto()
    """The pod did what was asked."""
    REFUSED = auto()
    """The request is wrong: a redirect, or a 4xx but 429."""
    FULL = auto()
    """The pod has no room: 429, 503 with Retry-After, and TURNED_AWAY where it answers other requests."""
    TURNED_AWAY = auto()
    """503 without a word of when: the pod read nothing of the request, by a defect or because it is full."""
    UNABLE = auto()
    """Another pod may be able to: 501, an answer that is too large."""
    BROKEN = auto()
    """Another 5xx, a connection that broke off, an error event, a stream without a byte."""
    SILENT = auto()
    """Nothing came in time."""
    UNREACHABLE = auto()
    """No connection came about."""
    LEAVING = auto()
    """The pod says that it shuts down: it takes nothing more, and what it has it ends well."""
    DEAD = auto()
    """The pod says that its engine has died, perhaps of this request."""
    ABORTED = auto()
    """The pod gave the answer up, and calls it finished: it shuts down, goes to sleep or is paused."""
    CLIENT_GONE = auto()
    """Nobody is there to take the answer."""

    __hash__ = object.__hash__
    """An enumeration's own is no C function, and what follows from an outcome is looked up several times a request."""

    @property
    def is_retried(self) -> bool:
        """Whether another pod is asked while the client has seen nothing; else the answer is passed on."""
        return _COURSES[self].retry

    @property
    def is_blamed(self) -> bool:
        """Whether it counts against the pod, unless it is the request."""
        return _COURSES[self].blame

    @property
    def is_leaving(self) -> bool:
        """Whether the pod is left at once, by its own word: it neither counts as a failure nor is held against it."""
        return self in (Outcome.LEAVING, Outcome.DEAD)

    @property
    def is_risky(self) -> bool:
        """Whether the request may be what broke the pod."""
        return _COURSES[self].risk


class _Course(NamedTuple):
    retry: bool
    blame: bool
    risk: bool


_COURSES = {
    Outcome.ANSWERED: _Course(retry=False, blame=False, risk=False),
    Outcome.REFUSED: _Course(retry=False, blame=False, risk=False),
    Outcome.FULL: _Course(retry=True, blame=False, risk=False),
    Outcome.TURNED_AWAY: _Course(retry=True, blame=True, risk=False),
    Outcome.UNABLE: _Course(retry=True, blame=False, risk=False),
    Outcome.BROKEN: _Course(retry=True, blame=True, risk=True),
    Outcome.SILENT: _Course(retry=True, blame=False, risk=False),
    Outcome.UNREACHABLE: _Course(retry=True, blame=False, risk=False),
    Outcome.LEAVING: _Course(retry=True, blame=False, risk=False),
    Outcome.DEAD: _Course(retry=True, blame=False, risk=True),
    Outcome.ABORTED: _Course(retry=True, blame=False, risk=True),
    Outcome.CLIENT_GONE: _Course(retry=False, blame=False, risk=False),
}

FAILURES = {
    "connect": Outcome.UNREACHABLE,
    "disconnect": Outcome.BROKEN,
    "error": Outcome.BROKEN,
    "timeout": Outcome.SILENT,
    "too_large": Outcome.UNABLE,
}
"""By the reason that metrics give for an attempt without an answer."""

_STATUSES = {429: Outcome.FULL, 501: Outcome.UNABLE, 503: Outcome.TURNED_AWAY}


def of_status(status: int, *, says_when: bool) -> Outcome:
    """The outcome of an answer with that status. `says_when`: it has Retry-After."""
    if status < 300:
        return Outcome.ANSWERED
    if status == 503 and says_when:
        return Outcome.FULL
    return _STATUSES.get(status) or (Outcome.BROKEN if status >= 500 else Outcome.REFUSED)
