"""Decide the result of an attempt from what the engine did and what the client has of the answer. Pure.

An attempt is one request at one pod. `result_of` is called twice for a stream: when its answer begins, and when it
ends. Whoever calls it acts on the result; nothing else decides whether another pod is tried or a pod is at fault.

| the engine | the client has nothing of this attempt | the client has a part of it |
|---|---|---|
| began an answer | `GoesOn` | `GoesOn` |
| completed an answer | `Done` | `Done` |
| refused the request | `Refused` | |
| failed in any way | `Retry` with the cause | `Broken` with the cause |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never


class Cause(Enum):
    """Why an attempt failed."""

    FULL = auto()
    """The pod has no room: 429, 503 with Retry-After, or TURNED_AWAY by a pod that answers other requests."""
    TURNED_AWAY = auto()
    """503 without Retry-After: the pod did not process the request, because of a defect or because it is full."""
    UNABLE = auto()
    """Another pod may be able to answer: 501, an unknown path, an answer that is too large."""
    BROKEN = auto()
    """Another 5xx, an answer that broke off or ended without its end mark, an error event, a stream without a token."""
    SILENT = auto()
    """Nothing came in time."""
    UNREACHABLE = auto()
    """No connection could be made."""
    LEAVING = auto()
    """The pod says that it shuts down: it takes no new requests, and completes those that it has."""
    DEAD = auto()
    """The pod says that its engine has died, perhaps because of this request."""
    NO_ANSWER = auto()
    """What the pod said is no answer to the request, although its status may be 200: a page, half an object, a
    redirect, a refusal of the gateway's own key, or that it lacks a model that it lists."""
    ABORTED = auto()
    """The pod gave up the answer but calls it finished: it shuts down, goes to sleep or is paused."""

    __hash__ = object.__hash__
    """Enum's own hash is not a C function."""

    @property
    def is_pods_fault(self) -> bool:
        """Whether the failure counts against the pod, unless the request is at fault."""
        return self in (Cause.BROKEN, Cause.TURNED_AWAY, Cause.NO_ANSWER)

    @property
    def is_leaving(self) -> bool:
        """Whether the pod said that it leaves: it gets no more requests, and the attempt does not count as a fault."""
        return self in (Cause.LEAVING, Cause.DEAD)

    @property
    def is_risky(self) -> bool:
        """Whether the request may be what broke the pod."""
        return self in (Cause.BROKEN, Cause.DEAD, Cause.ABORTED)


# -- what the engine did -----------------------------------------------------------------------------------------------


class Failure(Enum):
    """How the exchange with an engine failed. The value is the metrics' label."""

    CONNECT = "connect"
    """No connection could be made."""
    DISCONNECT = "disconnect"
    """The connection broke off, or the stream ended without a token or without its end mark."""
    TIMEOUT = "timeout"
    """Nothing came in time, or the engine sleeps."""
    TOO_LARGE = "too_large"
    """The body of an error is too large to keep."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The exchange failed before the answer was whole."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The engine answered with a status of 300 or more.

    `says_when`: the answer has Retry-After. `meaning`: what a known text of an engine says in the body of a 5xx.
    `is_unknown_path`: the body says that the engine does not know the path. `is_unknown_model`: it says that the engine
    lacks the model. `is_keys`: it refuses the key of the gateway.
    """

    status: int
    says_when: bool = False
    meaning: Cause | None = None
    is_unknown_path: bool = False
    is_unknown_model: bool = False
    is_keys: bool = False


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The engine sent an error event in a stream. `code`: the HTTP status in it, if there is one. `meaning`: what a
    known text says."""

    code: int | None
    meaning: Cause | None


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The engine gave up the answer but calls it finished."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The engine sent a whole body with status 200 that is no answer of the API."""


@dataclass(frozen=True, slots=True)
class Began:
    """The engine has sent the first token of a stream, or the beginning of a large answer, and more comes."""

    is_stream: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine has sent the whole answer, of a stream with its end mark."""

    is_stream: bool


Observed = Failed | ErrorStatus | ErrorEvent | GaveUp | NoAnswer | Began | Ended
"""What an engine did, as far as it decides the result."""


class ClientHas(Enum):
    """What the client has of the answer."""

    NOTHING = auto()
    EARLIER_PART = auto()
    """A part that an earlier attempt gave; this attempt was asked for the rest."""
    PART = auto()
    """A part that this attempt gave."""


# -- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GoesOn:
    """The answer is good so far, and more comes."""


@dataclass(frozen=True, slots=True)
class Done:
    """The pod did all that was asked."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is wrong: a 4xx except 429. The client gets the engine's answer."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed, and the client has nothing of it: another pod may do better.

    `reason`: the label in the metrics.
    """

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The attempt failed after the client got a part of it: another pod may give the rest."""

    cause: Cause


Result = GoesOn | Done | Refused | Retry | Broken
GOES_ON, DONE, REFUSED = GoesOn(), Done(), Refused()

_CAUSES = {
    Failure.CONNECT: Cause.UNREACHABLE,
    Failure.DISCONNECT: Cause.BROKEN,
    Failure.TIMEOUT: Cause.SILENT,
    Failure.TOO_LARGE: Cause.UNABLE,
}
_BEGAN = {is_stream: Began(is_stream) for is_stream in (False, True)}
_ENDED = {is_stream: Ended(is_stream) for is_stream in (False, True)}


def began(*, is_stream: bool) -> Began:
    """Return the observation of every request that goes well, without making an object."""
    return _BEGAN[is_stream]


def ended(*, is_stream: bool) -> Ended:
    """Return the observation of every request that ends well, without making an object."""
    return _ENDED[is_stream]


def result_of(observed: Observed, client_has: ClientHas, *, is_at_work: bool = False) -> Result:
    """Return the result of an attempt.

    `is_at_work`: the pod began to answer another request lately. A pod that turns one request away while it answers
    others is full, not broken.
    """
    match observed:
        case Began(is_stream) | Ended(is_stream):
            if not is_stream and client_has is ClientHas.EARLIER_PART:
                return Retry(Cause.UNABLE, "error")  # it was asked for the rest of a stream
            return GOES_ON if isinstance(observed, Began) else DONE
        case ErrorStatus():
            cause, reason = _cause_of_status(observed), "status"
            if cause is None:
                return REFUSED
        case Failed(failure):
            cause, reason = _CAUSES[failure], failure.value
        case ErrorEvent(code, meaning):
            # Once a stream runs, the pod has not turned the request away.
            is_turned_away = code == 503 and client_has is not ClientHas.PART
            cause, reason = meaning or (Cause.TURNED_AWAY if is_turned_away else Cause.BROKEN), "error"
        case GaveUp():
            cause, reason = Cause.ABORTED, "status"
        case NoAnswer():
            cause, reason = Cause.NO_ANSWER, "no_answer"
        case _:
            assert_never(observed)
    if client_has is ClientHas.PART:
        return Broken(cause)
    return Retry(Cause.FULL if cause is Cause.TURNED_AWAY and is_at_work else cause, reason)


def _cause_of_status(answer: ErrorStatus) -> Cause | None:
    """Return why a pod answered with this status; None if the request is wrong."""
    if answer.is_unknown_path:
        return Cause.UNABLE
    if answer.is_unknown_model or answer.is_keys or answer.status < 400:
        return Cause.NO_ANSWER
    if answer.meaning is not None:
        return answer.meaning
    match answer.status:
        case 503:
            return Cause.FULL if answer.says_when else Cause.TURNED_AWAY
        case 429:
            return Cause.FULL
        case 501:
            return Cause.UNABLE
        case status:
            return Cause.BROKEN if status >= 500 else None
