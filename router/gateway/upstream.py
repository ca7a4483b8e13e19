"""One attempt at one pod, up to the moment the client may see something of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.http.target import Target
from router.fleet.lack import lack_of
from router.gateway.engine_client import Answer, BrokeOff, ConnectTimedOut, EngineClient, GivenUp, NotConnected
from router.gateway.error_events import engine_error
from router.gateway.errors import BadGateway, DeadlineExceeded, EngineLeaves, Lacking, UpstreamError
from router.gateway.last_words import GAVE_UP, is_aborted, meaning, meaning_of_body
from router.gateway.outcome import FAILURES, Outcome, of_status

WHOLE_BYTES = 2**20
"""An answer up to this is read whole, so that a pod's death within it can be made good. A larger one is passed on as it
comes: its client may take it as slowly as it likes."""
MAX_ERROR_BYTES = 16 * 2**20
"""Largest answer with an error, which is read whole: another pod may do better."""


@dataclass(slots=True)
class Opened:
    """An answer that has begun. `first`: what has come of its body; all of it where it `is_whole`."""

    response: Answer
    first: bytes
    is_stream: bool
    is_whole: bool

    @property
    def outcome(self) -> Outcome:
        """What the answer says of it, by its status and by the words of engines that are known."""
        status = self.response.status
        outcome = of_status(status, says_when=status >= 300 and "Retry-After" in self.response.headers)
        if status >= 500:
            return meaning_of_body(self.first) or outcome
        if outcome is Outcome.ANSWERED and (self.is_whole or self.is_stream) and is_aborted(self.first):
            return Outcome.ABORTED
        return outcome

    def take_first(self) -> bytes:
        """What has come of the body, which is not kept here any longer."""
        first, self.first = self.first, b""
        return first

    def close(self) -> None:
        """Be done with the answer, read to its end or not."""
        self.response.close()


def failure_of(outcome: Outcome, opened: Opened) -> UpstreamError:
    """What a client is told of an answer that is not passed on, should no other attempt do better."""
    status = opened.response.status
    if outcome is Outcome.LEAVING:
        return EngineLeaves(f"the engine answered {status}: it shuts down")
    return BadGateway(GAVE_UP if outcome is Outcome.ABORTED else f"the engine answered {status}")


class PodFailed(Exception):
    """An attempt without an answer. `error` is for the client, should no other attempt do better.

    `reason` is one of `outcome.FAILURES`, which gives the outcome where none is given.
    """

    def __init__(self, reason: str, error: UpstreamError, outcome: Outcome | None = None) -> None:
        super().__init__(error.detail)
        self.reason = reason
        self.error = error
        self.outcome = outcome or FAILURES[reason]


async def open_answer(
    client: EngineClient,
    target: Target,
    body: bytes,
    fields: bytes,
    deadline_s: float,
    keep: Callable[[int], bool],
    on_sent: Callable[[], None],
) -> Opened:
    """Send the request and wait for the answer's first byte, or for all of it where that is not much.

    `fields`: header fields as they are sent. `keep` is asked for room for so many bytes more of an answer that is no
    stream. `on_sent` is told once the request is on its way, or waits for a connection. Raises PodFailed, and Lacking
    where that is no pod's fault. The caller closes the answer. When this raises or is cancelled, its connection is
    closed already.
    """
    response: Answer | None = None
    try:
        response = await client.post(target, fields, body, on_sent, deadline_s)
        is_stream = response.status == 200 and response.content_type == "text/event-stream"
        if is_stream:
            first, is_whole = await response.readany(), False
        elif response.status < 300:
            first, is_whole = await _beginning(response, keep)
        else:
            first, is_whole = await _error(response, keep), True
        if is_stream and not first:
            text = "the engine sent a stream without a byte"
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
            raise Lacking(lack) from None
        why = f"{target.authority}: {cause}"
        raise PodFailed("connect", BadGateway("no connection to the engine came about", why)) from None
    except GivenUp as cause:
        raise PodFailed("timeout", EngineLeaves(f"{target.authority}: {cause}", asleep=True)) from None
    except TimeoutError:
        text = "the engine gave no answer in time"
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
    """The body, and whether that is all of it: there is more where it is large, or room is scarce."""
    chunks = []
    size = 0
    while chunk := await response.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > WHOLE_BYTES or not keep(len(chunk)):
            return b"".join(chunks), False
    return b"".join(chunks), True


async def _error(response: Answer, keep: Callable[[int], bool]) -> bytes:
    """The body to its end. Raises PodFailed when there is no room for it."""
    chunks = []
    size = 0
    while chunk := await response.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ERROR_BYTES or not keep(len(chunk)):
            error = BadGateway(f"the engine answered {response.status}, with more text than there is room for")
            raise PodFailed("too_large", error)
    return b"".join(chunks)
