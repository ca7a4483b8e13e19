"""One attempt at one pod, up to the moment the client may see something of it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from engine.contract.errors import ApiError
from router.gateway.error_events import engine_error
from router.gateway.errors import BadGateway, DeadlineExceeded

MAX_WHOLE_BYTES = 64 * 2**20
"""Largest answer that is not a stream: it is read whole, so that a pod's death within it can be made good."""

LARGE_BODY_BYTES = 2**20
"""A larger request body is written in pieces, so that other requests get their turn in between."""


class ConnectionWatch:
    """Ends an answer's body when its connection ends.

    A malformed chunk closes the connection, and aiohttp tells the connection alone: who reads the body would wait on.
    """

    __slots__ = ("_body", "_closed")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._body = response.content
        self._closed: asyncio.Future[None] | None = None
        connection = response.connection
        if connection is None or connection.protocol is None:  # the body is here already
            return
        self._closed = connection.protocol.closed
        if self._closed is None:
            self._end()
            return
        self._closed.remove_done_callback(_take_note)
        self._closed.add_done_callback(self._end)

    def stop(self) -> None:
        """The body is not read any more. The connection may go on to serve other requests."""
        if self._closed is not None:
            self._closed.remove_done_callback(self._end)
            self._closed.add_done_callback(_take_note)
            self._closed = None

    def _end(self, closed: asyncio.Future[None] | None = None) -> None:
        cause = None if closed is None or closed.cancelled() else closed.exception()
        if not self._body.is_eof() and self._body.exception() is None:
            self._body.set_exception(aiohttp.ClientPayloadError(str(cause or "it sent something that is not HTTP")))


def _take_note(closed: asyncio.Future[None]) -> None:
    """Look at how an idle connection ended, so that asyncio does not log it as something that nobody looked at."""
    if not closed.cancelled():
        closed.exception()


@dataclass(slots=True)
class Opened:
    """An answer that has begun. `first`: the first chunk of a stream, or the whole body of any other answer."""

    response: aiohttp.ClientResponse
    first: bytes
    is_stream: bool
    watch: ConnectionWatch

    @property
    def is_retryable(self) -> bool:
        """Whether another pod may do better: the pod is full or broken."""
        return self.response.status == 429 or self.response.status >= 500

    @property
    def is_defect(self) -> bool:
        """Whether the pod is broken, not full (429, 503 with Retry-After) or asked for what it cannot do (501)."""
        status = self.response.status
        return status >= 500 and status != 501 and not (status == 503 and "Retry-After" in self.response.headers)

    @property
    def is_refusal(self) -> bool:
        """Whether the pod sent the request away unread: by a defect of its own, or because it is full."""
        return self.response.status == 503

    @property
    def has_run(self) -> bool:
        """Whether the pod did what was asked; else it refused, mostly at once, and computed nothing."""
        return self.response.status < 300

    def close(self) -> None:
        """Be done with the answer, read to its end or not."""
        self.watch.stop()
        self.response.close()


class PodFailed(Exception):
    """An attempt that came to nothing. `error` is for the client, should no other attempt do better.

    `reason` is one of connect, disconnect, error, timeout, too_large; `is_down`: the pod could not be reached;
    `is_defect`: it had the request, and broke off or began with an error; `is_refusal`: see Opened.
    """

    def __init__(
        self, reason: str, error: ApiError, *, is_down: bool = False, is_defect: bool = False, is_refusal: bool = False
    ) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error
        self.is_down = is_down
        self.is_defect = is_defect
        self.is_refusal = is_refusal


async def open_answer(
    session: aiohttp.ClientSession, target: URL, body: bytes, headers: Mapping[str, str], deadline_s: float
) -> Opened:
    """Send the request and wait for the answer's first byte, or for all of it. Raises PodFailed.

    The caller closes it. When this raises or is cancelled, the connection is closed already.
    """
    response: aiohttp.ClientResponse | None = None
    watch: ConnectionWatch | None = None
    try:
        async with asyncio.timeout_at(deadline_s):
            data = body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)
            response = await session.post(target, data=data, headers=headers, allow_redirects=False)
            is_stream = response.status == 200 and response.content_type == "text/event-stream"
            watch = ConnectionWatch(response)
            first = await response.content.readany() if is_stream else await _whole(response)
            if is_stream and not first:
                error: ApiError = BadGateway(f"{target.authority} sent a stream without a byte")
                raise PodFailed("disconnect", error, is_defect=True)
            if is_stream and (said := engine_error(first)) is not None:
                raise PodFailed("error", BadGateway(said.message), is_defect=True, is_refusal=said.code == 503)
        opened, response = Opened(response, first, is_stream, watch), None
        return opened
    except aiohttp.ConnectionTimeoutError:
        error = DeadlineExceeded(f"{target.authority} did not accept a connection in time")
        raise PodFailed("connect", error, is_down=True) from None
    except TimeoutError:
        error = DeadlineExceeded(f"{target.authority} gave no answer in time")
        raise PodFailed("timeout", error) from None
    except aiohttp.ClientConnectorError as cause:
        raise PodFailed("connect", BadGateway(str(cause)), is_down=True) from None
    except (aiohttp.ClientError, OSError) as cause:
        text = f"{target.authority} broke off: {cause or type(cause).__name__}"
        raise PodFailed("disconnect", BadGateway(text), is_defect=True) from None
    finally:
        if response is not None:
            if watch is not None:
                watch.stop()
            response.close()


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The body to its end. Raises PodFailed when it is too large, and what aiohttp raises."""
    chunks = []
    size = 0
    while chunk := await response.content.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_WHOLE_BYTES:
            error = BadGateway(f"the engine's answer is larger than {MAX_WHOLE_BYTES} bytes; ask for a stream")
            raise PodFailed("too_large", error)
    return b"".join(chunks)
