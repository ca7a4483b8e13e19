"""Open one attempt at one pod, up to the moment when the client may see something of its answer: its first token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.common.http.target import Target
from router.edge.errors import (
    BadGateway,
    DeadlineExceeded,
    EngineLeaves,
    OutOfResources,
    UnsupportedEncoding,
    UpstreamError,
)
from router.engines.attempt_result import (
    Cause,
    ErrorEvent,
    ErrorStatus,
    Failed,
    Failure,
    GaveUp,
    NoAnswer,
    Observed,
    began,
)
from router.engines.engine_client import Answer, Body, ConnectTimedOut, EngineClient, GivenUp, NotConnected
from router.engines.engine_errors import (
    GAVE_UP,
    is_unknown_model,
    is_unknown_path,
    meaning_of_body,
)
from router.engines.inflating import inflated
from router.engines.stream_reader import StreamFailed, StreamReader, beginning
from router.engines.whole_answers import observed_whole
from router.fleet.lack import lack_of
from router.fleet.pod import Pod
from router.reading.inbound import Inbound

WHOLE_BYTES = 2**20
"""An answer of up to this many bytes is read whole, so that another pod can be tried if the pod dies within it. A
larger one is passed on as it comes, since its client may read slowly."""
HEARD_AT_ONCE = "audio/"
"""Content types with this prefix are passed on from the first byte, as streams are: speech is played as it comes."""
MAX_ERROR_BYTES = 16 * 2**20
"""Largest answer with an error. It is read whole, since another pod may succeed."""


@dataclass(slots=True)
class Opened:
    """An answer that has begun.

    `first`: the part of its body that has come; all of it if `is_whole`. `rest`: the rest of the body. `reader`: has
    read `first`, if the answer is a stream.
    """

    response: Answer
    rest: Body
    first: bytes
    is_whole: bool
    observed: Observed
    reader: StreamReader | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.reader is not None

    @property
    def content_length(self) -> int | None:
        """The body's length in bytes; None if the client cannot be told."""
        return self.response.content_length if self.rest is self.response else None

    def take_first(self) -> bytes:
        """Return the part of the body that has come, and release it here."""
        first, self.first = self.first, b""
        return first

    def close(self) -> None:
        """Release the answer, whether or not it was read to its end."""
        self.response.close()


def observed_status(status: int, body: bytes, *, says_when: bool, has_own_key: bool) -> ErrorStatus:
    """Return what an answer with this status, of 300 or more, and this body shows.

    `says_when`: it has Retry-After. `has_own_key`: the engine got the gateway's key, or none, but not the client's.
    """
    return ErrorStatus(
        status,
        says_when=says_when,
        meaning=meaning_of_body(body) if status >= 500 else None,
        is_unknown_path=is_unknown_path(status, body),
        is_unknown_model=is_unknown_model(status, body),
        is_keys=has_own_key and status in (401, 403),
    )


def failure_of(observed: Observed, cause: Cause, status: int) -> UpstreamError | None:
    """Return the error that the client gets if the answer is not passed on and no other attempt succeeds; None: the
    engine's own answer is an error that the client can use."""
    match observed:
        case ErrorStatus() if cause is Cause.LEAVING:
            return EngineLeaves(f"the engine answered {status}: it shuts down")
        case ErrorStatus(is_keys=True):
            return BadGateway(f"the engine answered {status}: it refuses the gateway's key (--engine-api-key-file)")
        case ErrorStatus() if status < 400:
            return BadGateway(f"the engine answered {status}, a redirect, which the gateway does not follow")
        case GaveUp():
            return BadGateway(GAVE_UP)
        case NoAnswer():
            return BadGateway("the engine answered 200 with a body that is no answer of this API")
        case ErrorEvent():
            return BadGateway("the engine answered 200 with an error")
    return None


def cannot_inflate(status: int, coding: str | None) -> str:
    """Return what to say of an answer with a content coding that cannot be undone."""
    return f"the engine answered {status} with Content-Encoding {(coding or '')[:40]!r}, which the gateway cannot undo"


def target_of(pod: Pod, inbound: Inbound) -> Target:
    """Return the target of the request at the pod."""
    if inbound.resource is None:
        return pod.targets[inbound.endpoint]
    method, path = inbound.resource
    return Target.of(pod.url + path, method)


class PodFailed(Exception):
    """An attempt without an answer. `error` is for the client if no other attempt succeeds."""

    def __init__(self, observed: Failed | ErrorEvent | GaveUp | NoAnswer, error: UpstreamError) -> None:
        super().__init__(error.detail)
        self.observed = observed
        self.error = error


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for an answer to begin. `until_s`: when to give it up, on the loop's clock. `longer`: is called
    then; it returns a later time, or None to give the answer up."""

    until_s: float
    longer: Callable[[], float | None] | None = None


async def open_answer(
    client: EngineClient,
    target: Target,
    asked: Inbound,
    fields: bytes,
    patience: Patience,
    keep: Callable[[int], bool],
    on_sent: Callable[[], None],
    *,
    has_own_key: bool,
) -> Opened:
    """Send the request and wait for a stream's first token, or for all of a small answer that is no stream.

    `fields`: header fields as they are sent. `keep` reserves bytes for an answer that is no stream, or returns False.
    `on_sent` is called once the request is on its way or waits for a connection. `has_own_key`: see `observed_status`.
    Raises PodFailed, or OutOfResources if no pod is at fault. The caller closes the answer. If this raises or is
    cancelled, the connection is closed already.
    """
    response: Answer | None = None
    try:
        if asked.upload is None:
            response = await client.post(target, fields, asked.body, on_sent, patience.until_s, patience.longer)
        else:
            response = await client.upload(target, fields, asked.upload.pieces(), on_sent, patience.until_s)
        opened = await _opened(response, asked, keep, has_own_key=has_own_key)
        response.set_deadline(None)
        response = None
        return opened
    except NotConnected as cause:
        raise _not_connected(target, cause) from None
    except (OSError, StreamFailed) as cause:
        raise pod_failed(cause, target.authority) from None
    finally:
        if response is not None:
            response.close()


def pod_failed(cause: OSError | StreamFailed, authority: str) -> PodFailed:
    """Return what it means that an answer did not begin well. `authority`: the pod's, for logs."""
    match cause:
        case StreamFailed():
            leaves = isinstance(cause.observed, ErrorEvent) and cause.observed.meaning is Cause.LEAVING
            return PodFailed(cause.observed, EngineLeaves(cause.message) if leaves else BadGateway(cause.message))
        case GivenUp():
            return PodFailed(Failed(Failure.TIMEOUT), EngineLeaves(f"{authority}: {cause}", asleep=True))
        case TimeoutError():
            text = "the engine did not answer in time"
            return PodFailed(Failed(Failure.TIMEOUT), DeadlineExceeded(text, f"{authority}: {text}"))
        case OSError():
            text = "the engine broke off its answer"
            error = BadGateway(text, f"{authority}: {text}: {cause or type(cause).__name__}")
            return PodFailed(Failed(Failure.DISCONNECT), error)


def _not_connected(target: Target, cause: NotConnected) -> Exception:
    if isinstance(cause, ConnectTimedOut):
        text = "the engine did not accept a connection in time"
        error: UpstreamError = DeadlineExceeded(text, f"{target.authority}: {text}")
    elif (lack := lack_of(cause)) is not None:
        return OutOfResources(lack)
    else:
        error = BadGateway("no connection to the engine could be made", f"{target.authority}: {cause}")
    return PodFailed(Failed(Failure.CONNECT), error)


async def _opened(response: Answer, asked: Inbound, keep: Callable[[int], bool], *, has_own_key: bool) -> Opened:
    """Wait for the first token of a stream, or for all of a small answer.

    Raises as `Answer.readany`, StreamFailed and PodFailed.
    """
    status = response.status
    coding = response.headers.get("Content-Encoding")
    body: Body = response
    try:
        if coding is not None:
            body = inflated(response, coding)
    except UnsupportedEncoding:
        raise PodFailed(NoAnswer(), BadGateway(cannot_inflate(status, coding))) from None
    if status >= 300:
        first, says_when = await _error(body, status, keep), "Retry-After" in response.headers
        observed: Observed = observed_status(status, first, says_when=says_when, has_own_key=has_own_key)
        return Opened(response, body, first, True, observed)
    if status == 200 and response.content_type == "text/event-stream":
        reader = StreamReader(asked.endpoint, asked.answers, is_rest=asked.is_rest)
        first = await beginning(body, reader)
        return Opened(response, body, first, False, began(is_stream=True), reader)
    if response.content_type.startswith(HEARD_AT_ONCE):
        return Opened(response, body, await body.readany(), False, began(is_stream=False))
    first, is_whole = await _beginning(body, keep)
    observed = observed_whole(asked.endpoint, first) if is_whole else began(is_stream=False)
    return Opened(response, body, first, is_whole, observed)


async def _beginning(body: Body, keep: Callable[[int], bool]) -> tuple[bytes, bool]:
    """Return the body's beginning, and whether it is all: a large body, or one that does not fit, is not read whole."""
    chunks = []
    size = 0
    while chunk := await body.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > WHOLE_BYTES or not keep(len(chunk)):
            return b"".join(chunks), False
    return b"".join(chunks), True


async def _error(body: Body, status: int, keep: Callable[[int], bool]) -> bytes:
    """Return the whole body of an error. Raises PodFailed if there is no room for it."""
    chunks = []
    size = 0
    while chunk := await body.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ERROR_BYTES or not keep(len(chunk)):
            error = BadGateway(f"the engine answered {status}, with a body that is too large to keep")
            raise PodFailed(Failed(Failure.TOO_LARGE), error)
    return b"".join(chunks)
