"""Open one attempt at one pod, up to the moment when the client may see something of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.common.http.target import Target
from router.continuing.transcript_responses import only_begins
from router.edge.errors import BadGateway, DeadlineExceeded, EngineLeaves, OutOfResources, UpstreamError
from router.engines.aborted_answers import is_cut, is_end_alone
from router.engines.engine_client import Answer, BrokeOff, ConnectTimedOut, EngineClient, GivenUp, NotConnected
from router.engines.engine_errors import GAVE_UP, is_aborted, meaning, meaning_of_body
from router.engines.error_events import engine_error
from router.engines.outcome import FAILURES, Outcome, of_status
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
    def outcome(self) -> Outcome:
        """The outcome that the answer's status and the error texts of known engines show."""
        status = self.response.status
        outcome = of_status(status, says_when=status >= 300 and "Retry-After" in self.response.headers)
        if status >= 500:
            return meaning_of_body(self.first) or outcome
        if outcome is not Outcome.ANSWERED or not (self.is_whole or self.is_stream):
            return outcome
        without_a_word = is_end_alone if self.is_stream else is_cut
        return Outcome.ABORTED if is_aborted(self.first) or without_a_word(self.first) else outcome

    def take_first(self) -> bytes:
        """Return the part of the body that has come, and release it here."""
        first, self.first = self.first, b""
        return first

    def close(self) -> None:
        """Release the answer, whether or not it was read to its end."""
        self.response.close()


def failure_of(outcome: Outcome, opened: Opened) -> UpstreamError:
    """Return the error that the client gets if the answer is not passed on and no other attempt succeeds."""
    status = opened.response.status
    if outcome is Outcome.LEAVING:
        return EngineLeaves(f"the engine answered {status}: it shuts down")
    return BadGateway(GAVE_UP if outcome is Outcome.ABORTED else f"the engine answered {status}")


def target_of(pod: Pod, inbound: Inbound) -> Target:
    """Return the target of the request at the pod."""
    if inbound.resource is None:
        return pod.targets[inbound.endpoint]
    method, path = inbound.resource
    return Target.of(pod.url + path, method)


class PodFailed(Exception):
    """An attempt without an answer. `error` is for the client if no other attempt succeeds.

    `reason` is one of `outcome.FAILURES`, which gives the outcome if none is given.
    """

    def __init__(self, reason: str, error: UpstreamError, outcome: Outcome | None = None) -> None:
        super().__init__(error.detail)
        self.reason = reason
        self.error = error
        self.outcome = outcome or FAILURES[reason]


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
            error: UpstreamError = BadGateway(text, f"{target.authority}: {text}")
            raise PodFailed("disconnect", error)
        if is_stream and (said := engine_error(first)) is not None:
            outcome = meaning(said.message) or (Outcome.TURNED_AWAY if said.code == 503 else Outcome.BROKEN)
            leaves = outcome is Outcome.LEAVING
            raise PodFailed("error", EngineLeaves(said.message) if leaves else BadGateway(said.message), outcome)
        response.set_deadline(None)
        opened, response = Opened(response, first, is_stream, is_whole), None
        return opened
    except ConnectTimedOut:
        text = "the engine did not accept a connection in time"
        error = DeadlineExceeded(text, f"{target.authority}: {text}")
        raise PodFailed("connect", error) from None
    except NotConnected as cause:
        if (lack := lack_of(cause)) is not None:
            raise OutOfResources(lack) from None
        why = f"{target.authority}: {cause}"
        raise PodFailed("connect", BadGateway("no connection to the engine could be made", why)) from None
    except GivenUp as cause:
        raise PodFailed("timeout", EngineLeaves(f"{target.authority}: {cause}", asleep=True)) from None
    except TimeoutError:
        text = "the engine did not answer in time"
        error = DeadlineExceeded(text, f"{target.authority}: {text}")
        raise PodFailed("timeout", error) from None
    except BrokeOff as cause:
        raise _broke_off(target, cause) from None
    finally:
        if response is not None:
            response.close()


def _broke_off(target: Target, cause: Exception) -> PodFailed:
    text = "the engine broke off its answer"
    return PodFailed("disconnect", BadGateway(text, f"{target.authority}: {text}: {cause or type(cause).__name__}"))


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
            raise PodFailed("too_large", error)
    return b"".join(chunks)
