"""Copy an answer from an engine to a client: chunk by chunk, unparsed, or in pieces once it is complete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from engine.common.sse import DONE, named_event, sse_event
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.message_errors import error_body as message_error_body
from engine.contract.requests import Endpoint
from engine.contract.responses import response_error
from router.continuing.transcript import SentEvents
from router.edge.errors import BadGateway
from router.engines.attempt_result import ErrorEvent, Failed, Failure, GaveUp, Observed
from router.engines.engine_errors import (
    GAVE_UP,
    before_abort,
    before_end,
    before_error,
    engine_error,
    error_event,
    may_end,
    meaning,
    tells_reason,
)
from router.engines.usage import TAIL_BYTES, Tail

HELD_BYTES = 2**18
"""An event that is longer than this, in bytes, is sent before its end has come."""
LAST_EVENT_S = 1.0
"""Seconds that a client may take to accept the error event that ends a broken stream."""
EARLY_CHUNKS = 8
"""If an answer is given up before its first token, it has at most this many chunks. Later chunks are only checked for
`[DONE]` at their end, which is cheaper."""
PIECE_BYTES = 2**14
"""Bytes of a whole answer that the client has to take within each idle timeout."""
SMALL_BYTES = 2**15
"""A whole answer of up to this many bytes is written with its head, in one packet. It fits the transport's buffer, so
the write does not wait."""
REARM_SHARE = 0.25
"""The idle timer is set anew only once this share of the timeout has passed: that is cheaper than at every chunk. It is
set to the timeout plus this share. So it never ends before the timeout, and is late by this share at most."""

_MAY_FAIL = re.compile(rb'"(?:err|ab)or')
"""Found in every event that `engine_error` or `before_abort` recognizes. One search for both costs 0.1 us more than for
one."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_SEAM_BYTES = 3
"""Bytes of the longest end of an event, less one."""


class StreamBroke(Exception):
    """The engine's stream ended wrongly, was given up, or went silent, after its first byte: `observed` says which."""

    def __init__(
        self, message: str, observed: Failed | ErrorEvent | GaveUp, detail: str | None = None, event: bytes = b""
    ) -> None:
        """`detail`: for logs; may name the engine's address. `event`: the engine's own error event, not sent yet."""
        super().__init__(message)
        self.detail = detail or message
        self.observed: Observed = observed
        self._event = event

    def last_event(self, path: str = "", number: int = 0) -> bytes:
        """Return the error event that ends a stream of `path`: the engine's own, if it sent one.

        `number`: the event's number, if the path's events have numbers.
        """
        if path in MESSAGE_PATHS:
            return self._event or named_event("error", message_error_body(BadGateway(str(self))))
        if path.startswith(Endpoint.RESPONSES):
            return self._event or named_event("error", response_error(BadGateway(str(self)), number))
        return self._event or sse_event(BadGateway(str(self)).body())


class ClientStalled(Exception):
    """The client accepted nothing during the idle timeout."""


class Deadline:
    """A cheap `asyncio.timeout` for streams: it cancels what its block awaits at the time set with `at`, and raises
    TimeoutError then.

    Any other cancellation of the task passes through, even if it comes together with the deadline. On Python 3.11 a
    lookup of the running loop is a system call, and asyncio.timeout makes one at each step.
    """

    __slots__ = ("_cancelling", "_is_over", "_loop", "_task", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: the running loop. No deadline is set at first."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelling = 0
        self._is_over = False

    def at(self, time_s: float) -> None:
        """Set a new deadline, on the loop's clock. Has no effect once a deadline has passed."""
        if self._is_over:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time_s, self._expire)

    def _expire(self) -> None:
        assert self._task is not None
        self._is_over = True
        self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self._loop)
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        if self._is_over and task is not None and task.uncancel() <= self._cancelling and _is_cancelled(kind):
            raise TimeoutError from error


def _is_cancelled(kind: type[BaseException] | None) -> bool:
    return kind is not None and issubclass(kind, asyncio.CancelledError)


class Source(Protocol):
    """The body of an answer, as it comes."""

    @property
    def is_read(self) -> bool:
        """Whether the body has ended and all of it has been read."""
        ...

    async def readany(self) -> bytes:
        """Return what has come, at least a byte; empty at the end. Raises OSError if the body breaks off."""
        ...


class Relay:
    """Copies one answer. The bytes after the last complete event are held until that event is complete.

    A client cannot use half an event. If an engine died within one, half an event would precede the error event.
    """

    def __init__(
        self,
        source: Source,
        sink: AbstractStreamWriter,
        tail: Tail,
        *,
        is_events: bool,
        idle_s: float,
        deadline_s: float,
        sent: SentEvents | None = None,
    ) -> None:
        """`sent`: keeps what was sent, so that another pod can give the rest."""
        self._is_events = is_events
        self._sent = sent
        self._source = source
        self._sink = sink
        self._idle_s = idle_s
        self._deadline_s = deadline_s
        self._tail = tail
        self._held: list[bytes] = []
        self._held_size = 0
        self._seam = b""
        """The last bytes that came: the end of an event may begin in them."""
        self._is_mid_event = False

    async def copy(self, chunk: bytes, on_first_sent: Callable[[], None] | None = None) -> None:
        """Send the first `chunk` and all that follows, to the end. `on_first_sent` is called once `chunk` is sent.

        An event that says that the engine failed or gave up is not sent. Then StreamBroke is raised.
        Also raises ClientStalled, or ConnectionError if the client is gone.
        """
        loop = asyncio.get_running_loop()
        clock = loop.time
        read, write, keep, may_fail = self._source.readany, self._sink.write, self._tail.add, _MAY_FAIL.search
        rearm_at_s = 0.0
        early = EARLY_CHUNKS
        is_events, is_reading, is_ended, sent = self._is_events, False, False, self._sent
        try:
            with Deadline(loop) as limit:
                while chunk:
                    now_s = clock()
                    if now_s >= rearm_at_s:
                        rearm_at_s = now_s + REARM_SHARE * self._idle_s
                        limit.at(min(rearm_at_s + self._idle_s, self._deadline_s))
                    keep(chunk if len(chunk) <= TAIL_BYTES else chunk[-TAIL_BYTES:])
                    if is_events and (self._held or self._is_mid_event or not chunk.endswith(_EVENT_ENDS)):
                        chunk = self._complete(chunk)
                    if is_events and may_fail(chunk) is not None:
                        chunk = await self._until_failure(chunk)
                    if is_events and (early > 0 or chunk.endswith(DONE)):
                        early -= 1
                        if may_end(chunk):
                            chunk = await self._until_given_up(chunk)
                    if len(chunk) > PIECE_BYTES:
                        await self._write_pieces(chunk)
                    elif chunk and self._source.is_read and not self._held:
                        await self._sink.write_eof(chunk)  # one packet for the last events and the end
                        is_ended = True
                    elif chunk:
                        await write(chunk)
                    if on_first_sent is not None:
                        on_first_sent()
                        on_first_sent = None
                    if is_ended:
                        return
                    if sent is not None:
                        sent.add(chunk)
                    chunk = b""  # so that its memory is free while the next one is awaited
                    is_reading = True
                    try:
                        chunk = await read()
                    except OSError as error:
                        detail = f"the engine's stream broke: {error or type(error).__name__}"
                        raise StreamBroke("the engine's stream broke", Failed(Failure.DISCONNECT), detail) from None
                    is_reading = False
                if self._held:
                    await write(self._take_held())
                await self._sink.write_eof()
        except TimeoutError:
            if not is_reading:
                raise ClientStalled from None
            late = clock() >= self._deadline_s
            text = "the request's deadline passed" if late else "the engine went silent"
            raise StreamBroke(text, Failed(Failure.TIMEOUT)) from None

    async def _until_failure(self, chunk: bytes) -> bytes:
        """Return `chunk` if no event in it reports the engine's failure.

        Otherwise send what comes before that event, and raise StreamBroke.
        """
        error, given_up = engine_error(chunk), before_abort(chunk)
        if error is None and given_up is None:
            return chunk
        at = before_error(chunk) if given_up is None else given_up
        await self._send_before(chunk[:at])
        if given_up is not None or error is None:
            raise StreamBroke(GAVE_UP, GaveUp())
        observed = ErrorEvent(error.code, meaning(error.message))
        raise StreamBroke("the engine's stream broke", observed, error.message, error_event(chunk[at:]))

    async def _until_given_up(self, chunk: bytes) -> bytes:
        """Return the part of `chunk` still to be sent. Raises StreamBroke if an answer that was given up ends in it.

        Without `sent` this cannot be known: the finish reason may be further back than the tail.
        """
        sent = self._sent
        if tells_reason(chunk) or sent is None or not sent.is_kept or tells_reason(self._tail.last_bytes()):
            return chunk
        at = before_end(chunk)
        if at is None:
            return chunk
        await self._send_before(chunk[:at])
        if sent.is_kept and sent.read().is_cut:
            raise StreamBroke(GAVE_UP, GaveUp())
        return chunk[at:]

    async def _send_before(self, events: bytes) -> None:
        """Send and record the events before one that may end the answer."""
        if events:
            await self._sink.write(events)
            if self._sent is not None:
                self._sent.add(events)

    async def _write_pieces(self, chunk: bytes) -> None:
        """Write `chunk` in pieces, so that no buffer holds a second copy of all of it."""
        for start in range(0, len(chunk), PIECE_BYTES):
            await self._sink.write(chunk[start : start + PIECE_BYTES])

    def _complete(self, chunk: bytes) -> bytes:
        """Return what may be sent of the held bytes and `chunk`: all up to the end of the last complete event.

        It searches only `chunk` and the few bytes before it, since an engine may send byte by byte.
        """
        seam = self._seam if self._held or self._is_mid_event else b""
        seen = seam + chunk
        end = max(seen.rfind(mark) + len(mark) if mark in seen else 0 for mark in _EVENT_ENDS) - len(seam)
        self._seam = seen[-_SEAM_BYTES:]
        if end <= 0:
            self._held.append(chunk)
            self._held_size += len(chunk)
            if self._held_size <= HELD_BYTES:
                return b""
            self._is_mid_event = True
            return self._take_held()
        rest = chunk[end:]
        self._is_mid_event = False
        complete = self._take_held() + chunk[:end]
        if len(rest) > HELD_BYTES:
            self._is_mid_event = True
            return complete + rest
        if rest:
            self._held, self._held_size = [rest], len(rest)
        return complete

    def _take_held(self) -> bytes:
        held, self._held, self._held_size = b"".join(self._held), [], 0
        return held

    async def end_with(self, event: bytes) -> None:
        """Send one more event, with an error. The held part of a broken event is dropped.

        Raises ClientStalled or ConnectionError.
        """
        await self.say(b"\n\n" + event if self._is_mid_event else event)

    async def say(self, events: bytes) -> None:
        """Send events that are not from the source being copied. Raises ClientStalled or ConnectionError."""
        try:
            async with asyncio.timeout(LAST_EVENT_S):
                await self._sink.write(events)
        except TimeoutError:
            raise ClientStalled from None


async def send_whole(request: web.Request, answer: web.Response, *, idle_s: float, deadline_s: float) -> None:
    """Send `answer`, and wait until none of it is left in this process.

    The client has `idle_s` for each piece. For all of them it has until `deadline_s`, but at least `idle_s`.
    Raises ClientStalled, or ConnectionError if the client is gone.
    """
    transport, body = request.transport, answer.body
    if transport is None:
        raise ConnectionResetError("the client is gone")
    assert isinstance(body, bytes)
    writer = await answer.prepare(request)
    assert writer is not None  # only a HEAD request has none
    is_small = len(body) <= SMALL_BYTES
    if is_small:
        await answer.write_eof()
        if not transport.get_write_buffer_size():
            return
    clock = asyncio.get_running_loop().time
    deadline_s = max(deadline_s, clock() + idle_s)
    transport.set_write_buffer_limits(high=0)  # else the last 64 KiB would count as sent while still here
    try:
        async with asyncio.timeout(idle_s) as limit:
            if is_small:
                await writer.drain()
                return
            for start in range(0, len(body), PIECE_BYTES):
                limit.reschedule(min(clock() + idle_s, deadline_s))
                await writer.write(body[start : start + PIECE_BYTES])
                await writer.drain()
            await writer.write_eof()
            await answer.write_eof()
    except TimeoutError:
        raise ClientStalled from None
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()
