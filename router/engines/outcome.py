"""The outcomes of a request at a pod, and the consequences of each, in one table."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Outcome(Enum):
    """The outcome of an attempt."""

    ANSWERED = auto()
    """The pod did what was asked."""
    REFUSED = auto()
    """The request is wrong: a redirect, or a 4xx except 429."""
    FULL = auto()
    """The pod has no room: 429, 503 with Retry-After, or TURNED_AWAY by a pod that answers other requests."""
    TURNED_AWAY = auto()
    """503 without Retry-After: the pod did not process the request, because of a defect or because it is full."""
    UNABLE = auto()
    """Another pod may be able to answer: 501, an answer that is too large."""
    BROKEN = auto()
    """Another 5xx, a connection that broke off, an error event, a stream without a byte."""
    SILENT = auto()
    """Nothing came in time."""
    UNREACHABLE = auto()
    """No connection could be made."""
    LEAVING = auto()
    """The pod says that it shuts down: it takes no new requests, and completes those that it has."""
    DEAD = auto()
    """The pod says that its engine has died, perhaps because of this request."""
    ABORTED = auto()
    """The pod gave up the answer but calls it finished: it shuts down, goes to sleep or is paused."""
    CLIENT_GONE = auto()
    """The client has left."""

    __hash__ = object.__hash__
    """Enum's own hash is not a C function, and an outcome's consequences are looked up several times per request."""

    @property
    def is_retried(self) -> bool:
        """Whether another pod is tried, if the client has seen nothing yet; else the answer is passed on."""
        return _COURSES[self].retry

    @property
    def is_blamed(self) -> bool:
        """Whether the outcome counts against the pod, unless the request is at fault."""
        return _COURSES[self].blame

    @property
    def is_leaving(self) -> bool:
        """Whether the pod said that it leaves: it gets no more requests, and the attempt does not count as a fault."""
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
"""Outcomes by the metrics' reason for an attempt without an answer."""

_STATUSES = {429: Outcome.FULL, 501: Outcome.UNABLE, 503: Outcome.TURNED_AWAY}


def of_status(status: int, *, says_when: bool) -> Outcome:
    """Return the outcome of an answer with that status. `says_when`: the answer has Retry-After."""
    if status < 300:
        return Outcome.ANSWERED
    if status == 503 and says_when:
        return Outcome.FULL
    return _STATUSES.get(status) or (Outcome.BROKEN if status >= 500 else Outcome.REFUSED)
