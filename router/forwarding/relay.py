"""Copy an answer from an engine to a client: chunk by chunk, unparsed, or in pieces once it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from engine.common.sse import named_event, sse_event
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.message_errors import error_body as message_error_body
from engine.contract.requests import Endpoint
from engine.contract.responses import response_error
from router.continuing.transcript import SentEvents
from router.edge.errors import BadGateway
from router.engines.attempt_result import ErrorEvent, Failed, Failure, GaveUp, Observed
from router.engines.engine_client import Body
from router.engines.stream_events import EventSplitter
from router.engines.stream_reader import StreamFailed, StreamReader
from router.engines.usage import Tail, Usage, whole_usage

HELD_BYTES = 2**18
"""An event that is longer than this, in bytes, is sent before its end has come."""
LAST_EVENT_S = 1.0
"""Seconds that a client may take to accept the error event that ends a broken stream."""
PIECE_BYTES = 2**14
"""Bytes of a whole answer that the client has to take within each idle timeout."""
SMALL_BYTES = 2**15
"""A whole answer of up to this many bytes is written with its head, in one packet. It fits the transport's buffer, so
the write does not wait."""
REARM_SHARE = 0.25
"""The idle timer is set anew only once this share of the timeout has passed: that is cheaper than at every chunk. It is
set to the timeout plus this share. So it never ends before the timeout, and is late by this share at most."""


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


class Watch(Protocol):
    """Watches the stream for its pod."""

    def saw_token(self, now_s: float) -> None:
        """Note that the pod works on this stream."""
        ...

    async def goes_on(self) -> bool:
        """Whether to wait on for a stream that was silent for the idle timeout."""
        ...


class Relay:
    """Copies one answer. Of a stream, the bytes after the last complete event are held until that event is complete.

    A client cannot use half an event. If an engine died within one, half an event would precede the error event.
    """

    def __init__(
        self,
        source: Body,
        sink: AbstractStreamWriter,
        *,
        reader: StreamReader | None,
        idle_s: float,
        deadline_s: float,
        watch: Watch | None = None,
        sent: SentEvents | None = None,
        is_json: bool = False,
    ) -> None:
        """`reader`: reads the stream; None: the answer is no stream. `idle_s`: seconds without a token, after which the
        `watch` is asked. `sent`: keeps what was sent, so that another pod can give the rest. `is_json`: the answer is
        one JSON value of unknown length."""
        self._reader = reader
        self._sent = sent
        self._source = source
        self._sink = sink
        self._idle_s = idle_s
        self._deadline_s = deadline_s
        self._watch = watch
        self._is_json = is_json
        self._tail = Tail()
        self._splitter = EventSplitter()
        self._is_mid_event = False
        """Whether a part of an event was sent before its end."""
        self._is_reading = False
        self._first = b""
        """The first chunk, until it is sent."""
        self._rearm_at_s = 0.0

    def usage(self, *, is_broken: bool = False) -> Usage:
        """Return the answer's token counts so far. `is_broken`: the answer broke off."""
        if self._reader is None:
            return whole_usage(self._tail.last_bytes())
        return self._reader.usage(is_broken=is_broken)

    async def copy(self, chunk: bytes, on_first_sent: Callable[[], None] | None = None) -> None:
        """Send the first `chunk` and all that follows, to the end. `on_first_sent` is called once `chunk` is sent.

        An event that says that the engine failed or gave up is not sent. Then StreamBroke is raised.
        Also raises ClientStalled, or ConnectionError if the client is gone.
        """
        loop = asyncio.get_running_loop()
        self._first, chunk = chunk, b""
        while True:
            try:
                with Deadline(loop) as limit:
                    await self._copy(limit, on_first_sent)
                return
            except TimeoutError:
                if not self._is_reading:
                    raise ClientStalled from None
                if await self._is_over_in_silence(loop.time()):
                    return
                on_first_sent = None

    async def _copy(self, limit: Deadline, on_first_sent: Callable[[], None] | None) -> None:
        """Send the first chunk, if it is not sent, and all that follows."""
        loop = asyncio.get_running_loop()
        clock, write, reader, sent = loop.time, self._sink.write, self._reader, self._sent
        chunk, self._first = self._first, b""  # no other reference may keep its memory
        if chunk:
            self._rearm(limit, clock())
        else:
            self._rearm_at_s = 0.0
            limit.at(min(clock() + self._idle_s, self._deadline_s))
            chunk = await self._next()
        while chunk:
            if reader is None:
                self._tail.add(chunk)
            else:
                chunk = self._complete(chunk)
                try:
                    reader.read(chunk)
                except StreamFailed as failed:
                    await self._send_before(chunk[: failed.at])
                    raise StreamBroke(str(failed), failed.observed, event=failed.event) from None
            now_s = clock()
            if now_s >= self._rearm_at_s and (reader is None or self._is_mid_event or reader.is_alive(chunk)):
                self._rearm(limit, now_s)
            if len(chunk) > PIECE_BYTES:
                await self._write_pieces(chunk)
            elif chunk and self._source.is_read and not self._splitter.held_bytes and self._may_end(chunk):
                await self._sink.write_eof(chunk)  # one packet for the last events and the end
                return
            elif chunk:
                await write(chunk)
            if on_first_sent is not None:
                on_first_sent()
                on_first_sent = None
            if sent is not None and chunk:
                sent.add(chunk)
            chunk = b""  # so that its memory is free while the next one is awaited
            chunk = await self._next()
        await self._end()

    def _rearm(self, limit: Deadline, now_s: float) -> None:
        """Set the idle timer anew, because the engine works."""
        self._rearm_at_s = now_s + REARM_SHARE * self._idle_s
        limit.at(min(self._rearm_at_s + self._idle_s, self._deadline_s))
        if self._watch is not None:
            self._watch.saw_token(now_s)

    async def _next(self) -> bytes:
        """Return what has come; empty at the end. Raises StreamBroke."""
        self._is_reading = True
        try:
            chunk = await self._source.readany()
        except OSError as error:
            if self._reader is not None and self._reader.has_end:
                self._is_reading = False
                return b""  # the answer ended before its connection did
            detail = f"the engine's stream broke: {error or type(error).__name__}"
            raise StreamBroke("the engine's stream broke", Failed(Failure.DISCONNECT), detail) from None
        self._is_reading = False
        return chunk

    async def _end(self) -> None:
        """End the answer, because nothing more comes. Raises StreamBroke if the engine ended it too early."""
        held = self._splitter.take_held()
        if held and self._reader is not None:
            try:
                self._reader.read(held + b"\n\n")  # the last event may lack its blank line
            except StreamFailed as failed:
                raise StreamBroke(str(failed), failed.observed, event=failed.event) from None
        if not self._may_end(held):
            text = "the engine ended its answer too early"
            raise StreamBroke(text, Failed(Failure.DISCONNECT))
        if held:
            await self._sink.write(held)
        await self._sink.write_eof()

    def _may_end(self, chunk: bytes) -> bool:
        """Whether the answer may end with `chunk`, or with what came before if that is empty."""
        if self._reader is not None:
            return self._reader.is_over
        return not self._is_json or (chunk or self._tail.last_bytes()).rstrip().endswith((b"}", b"]"))

    async def _is_over_in_silence(self, now_s: float) -> bool:
        """End the answer if only its connection goes on, and return True; return False if the stream may go on.

        Raises StreamBroke if it is given up, and ConnectionError.
        """
        if self._reader is not None and self._reader.has_end:
            await self._sink.write_eof()
            return True
        if now_s >= self._deadline_s:
            raise StreamBroke("the request's deadline passed", Failed(Failure.TIMEOUT))
        if self._watch is None or not await self._watch.goes_on():
            raise StreamBroke("the engine went silent", Failed(Failure.TIMEOUT))
        return False

    async def _send_before(self, events: bytes) -> None:
        """Send and record the events before one that ends the answer badly."""
        if events:
            await self._sink.write(events)
            if self._sent is not None:
                self._sent.add(events)

    async def _write_pieces(self, chunk: bytes) -> None:
        """Write `chunk` in pieces, so that no buffer holds a second copy of all of it."""
        for start in range(0, len(chunk), PIECE_BYTES):
            await self._sink.write(chunk[start : start + PIECE_BYTES])

    def _complete(self, chunk: bytes) -> bytes:
        """Return what may be sent of the held bytes and `chunk`: the complete events, and all of an event that is too
        long to be held."""
        splitter = self._splitter
        events = splitter.feed(chunk)
        if events and self._is_mid_event:
            self._is_mid_event = False
            if self._reader is not None:
                self._reader.read_part(events, is_first=False, is_last=True)
        return events + self._part(splitter.take_held()) if splitter.held_bytes > HELD_BYTES else events

    def _part(self, part: bytes) -> bytes:
        """Return a part of an event that is too long to be held back until it is complete."""
        if self._reader is not None:
            self._reader.read_part(part, is_first=not self._is_mid_event, is_last=False)
        self._is_mid_event = True
        return part

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
