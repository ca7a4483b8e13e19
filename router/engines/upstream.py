"""Open one attempt at one pod, up to the moment when the client may see something of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.common.http.target import Target
from router.continuing.transcript import only_begins
from router.edge.errors import BadGateway, DeadlineExceeded, EngineLeaves, OutOfResources, UpstreamError
from router.engines.attempt_result import (
    Cause,
    ErrorEvent,
    ErrorStatus,
    Failed,
    Failure,
    GaveUp,
    Observed,
    began,
    ended,
)
from router.engines.engine_client import Answer, BrokeOff, ConnectTimedOut, EngineClient, GivenUp, NotConnected
from router.engines.engine_errors import (
    GAVE_UP,
    engine_error,
    is_aborted,
    is_cut,
    is_end_alone,
    is_unknown_path,
    meaning,
    meaning_of_body,
)
from router.fleet.lack import lack_of
from router.fleet.pod import Pod
from router.reading.inbound import Inbound
from router.reading.upload import Upload

WHOLE_BYTES = 2**20
"""An answer of up to this many bytes is read whole, so that another pod can be tried if the pod dies within it. A
larger one is passed on as it comes, since its client may read slowly."""
HEARD_AT_ONCE = "audio/"
"""Content types with this prefix are passed on from the first byte, as streams are: speech is played as it comes."""
ANNOUNCED_BYTES = 2**18
"""Most bytes of a response's announcement (it repeats fields of the request) that are held back until more comes."""
MAX_ERROR_BYTES = 16 * 2**20
"""Largest answer with an error. It is read whole, since another pod may succeed."""


@dataclass(slots=True)
class Opened:
    """An answer that has begun. `first`: the part of its body that has come; all of it if `is_whole`."""

    response: Answer
    first: bytes
    is_stream: bool
    is_whole: bool

    @property
    def observed(self) -> Observed:
        """What the engine did, by the answer's status and the error texts of known engines."""
        status, first = self.response.status, self.first
        if status >= 300:
            return observed_status(status, first, says_when="Retry-After" in self.response.headers)
        without_a_word = is_end_alone if self.is_stream else is_cut
        if (self.is_whole or self.is_stream) and (is_aborted(first) or without_a_word(first)):
            return GaveUp()
        return ended(is_stream=False) if self.is_whole else began(is_stream=self.is_stream)

    def take_first(self) -> bytes:
        """Return the part of the body that has come, and release it here."""
        first, self.first = self.first, b""
        return first

    def close(self) -> None:
        """Release the answer, whether or not it was read to its end."""
        self.response.close()


def observed_status(status: int, body: bytes, *, says_when: bool) -> ErrorStatus:
    """Return what an answer with this status, of 300 or more, and this body shows. `says_when`: it has Retry-After."""
    return ErrorStatus(
        status,
        says_when=says_when,
        meaning=meaning_of_body(body) if status >= 500 else None,
        is_unknown_path=is_unknown_path(status, body),
    )


def observed_event(events: bytes) -> tuple[ErrorEvent, str] | None:
    """Return what an error event in `events` shows, and its message; None if there is none."""
    error = engine_error(events)
    return None if error is None else (ErrorEvent(error.code, meaning(error.message)), error.message)


def failure_of(cause: Cause, opened: Opened) -> UpstreamError:
    """Return the error that the client gets if the answer is not passed on and no other attempt succeeds."""
    status = opened.response.status
    if cause is Cause.LEAVING:
        return EngineLeaves(f"the engine answered {status}: it shuts down")
    return BadGateway(GAVE_UP if cause is Cause.ABORTED else f"the engine answered {status}")


def target_of(pod: Pod, inbound: Inbound) -> Target:
    """Return the target of the request at the pod."""
    if inbound.resource is None:
        return pod.targets[inbound.endpoint]
    method, path = inbound.resource
    return Target.of(pod.url + path, method)


class PodFailed(Exception):
    """An attempt without an answer. `error` is for the client if no other attempt succeeds."""

    def __init__(self, observed: Failed | ErrorEvent, error: UpstreamError) -> None:
        super().__init__(error.detail)
        self.observed = observed
        self.error = error


async def open_answer(
    client: EngineClient,
    target: Target,
    body: bytes | Upload,
    fields: bytes,
    deadline_s: float,
    keep: Callable[[int], bool],
    on_sent: Callable[[], None],
) -> Opened:
    """Send the request and wait for the answer's first byte, or for all of a small answer that is no stream.

    `fields`: header fields as they are sent. `keep` reserves bytes for an answer that is no stream, or returns False.
    `on_sent` is called once the request is on its way or waits for a connection. Raises PodFailed, or OutOfResources if
    no pod is at fault. The caller closes the answer. If this raises or is cancelled, the connection is closed already.
    """
    response: Answer | None = None
    try:
        if isinstance(body, bytes):
            response = await client.post(target, fields, body, on_sent, deadline_s)
        else:
            response = await client.upload(target, fields, body.pieces(), on_sent, deadline_s)
        opened = await _opened(response, target, keep)
        response.set_deadline(None)
        response = None
        return opened
    except NotConnected as cause:
        raise _not_connected(target, cause) from None
    except GivenUp as cause:
        error: UpstreamError = EngineLeaves(f"{target.authority}: {cause}", asleep=True)
        raise PodFailed(Failed(Failure.TIMEOUT), error) from None
    except TimeoutError:
        text = "the engine did not answer in time"
        error = DeadlineExceeded(text, f"{target.authority}: {text}")
        raise PodFailed(Failed(Failure.TIMEOUT), error) from None
    except BrokeOff as cause:
        text = "the engine broke off its answer"
        error = BadGateway(text, f"{target.authority}: {text}: {cause or type(cause).__name__}")
        raise PodFailed(Failed(Failure.DISCONNECT), error) from None
    finally:
        if response is not None:
            response.close()


def _not_connected(target: Target, cause: NotConnected) -> Exception:
    if isinstance(cause, ConnectTimedOut):
        text = "the engine did not accept a connection in time"
        error: UpstreamError = DeadlineExceeded(text, f"{target.authority}: {text}")
    elif (lack := lack_of(cause)) is not None:
        return OutOfResources(lack)
    else:
        error = BadGateway("no connection to the engine could be made", f"{target.authority}: {cause}")
    return PodFailed(Failed(Failure.CONNECT), error)


async def _opened(response: Answer, target: Target, keep: Callable[[int], bool]) -> Opened:
    """Wait for the first byte of a stream, or for all of a small answer. Raises as `Answer.readany`, and PodFailed."""
    is_stream = response.status == 200 and response.content_type == "text/event-stream"
    if is_stream or (response.status < 300 and response.content_type.startswith(HEARD_AT_ONCE)):
        first, is_whole = await response.readany(), False
        while is_stream and len(first) < ANNOUNCED_BYTES and only_begins(first):
            if not (more := await response.readany()):
                break
            first += more
    elif response.status < 300:
        first, is_whole = await _beginning(response, keep)
    else:
        first, is_whole = await _error(response, keep), True
    if is_stream and not first:
        text = "the engine sent an empty stream"
        raise PodFailed(Failed(Failure.DISCONNECT), BadGateway(text, f"{target.authority}: {text}"))
    if is_stream and (found := observed_event(first)) is not None:
        observed, message = found
        leaves = observed.meaning is Cause.LEAVING
        raise PodFailed(observed, EngineLeaves(message) if leaves else BadGateway(message))
    return Opened(response, first, is_stream, is_whole)


async def _beginning(response: Answer, keep: Callable[[int], bool]) -> tuple[bytes, bool]:
    """Return the body's beginning, and whether it is all: a large body, or one that does not fit, is not read whole."""
    chunks = []
    size = 0
    while chunk := await response.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > WHOLE_BYTES or not keep(len(chunk)):
            return b"".join(chunks), False
    return b"".join(chunks), True


async def _error(response: Answer, keep: Callable[[int], bool]) -> bytes:
    """Return the whole body of an error. Raises PodFailed if there is no room for it."""
    chunks = []
    size = 0
    while chunk := await response.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ERROR_BYTES or not keep(len(chunk)):
            error = BadGateway(f"the engine answered {response.status}, with a body that is too large to keep")
            raise PodFailed(Failed(Failure.TOO_LARGE), error)
    return b"".join(chunks)
