"""Send requests to engines and stream their answers, over connections that are kept and opened ahead of need."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn, Protocol

from multidict import CIMultiDict

from engine.common.http.connection import Connection, Fields
from engine.common.http.pool import Address, Pool
from engine.common.http.target import Target

READ_AHEAD_BYTES = 2**14
"""Bytes read ahead if the client is slow: this many in the socket, and twice as many here. This allows 30 MB/s at a
round trip of 0.5 ms."""
STALE_S = 0.25
"""If a used connection is lost this soon after a request, without a byte of an answer, the server has closed it while
the request was on its way."""
KEEP_EVERY_S = 0.5
OPENED_AHEAD = 32
"""Most connections opened per KEEP_EVERY_S, to all engines together. They cost 1 % of a core at most, and keep 300
connections open to vLLM and SGLang, which close idle ones after 5 s."""
FADES = 0.5 ** (KEEP_EVERY_S / 30)
"""Factor for each KEEP_EVERY_S, so that the number of connections to keep halves within 30 s."""


class NotConnected(OSError):
    """No connection could be made."""


class ConnectTimedOut(NotConnected):
    """No connection was made in time, and none was refused."""


class BrokeOff(ConnectionError):
    """The connection ended before the answer was complete, or its bytes are not HTTP."""


class GivenUp(TimeoutError):
    """The wait ended because the engine sleeps."""


class Body(Protocol):
    """The body of an answer, as it comes."""

    @property
    def is_read(self) -> bool:
        """Whether the body has ended and all of it has been read."""
        ...

    async def readany(self) -> bytes:
        """Return what has come, at least a byte; empty at the end. Raises OSError if the body breaks off."""
        ...


class Answer:
    """An answer as it comes in. Reading pauses while more than 2 * READ_AHEAD_BYTES of it wait."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_failure",
        "_headers",
        "_is_over",
        "_longer",
        "_loop",
        "_size",
        "_timer",
        "_waiter",
        "fields",
        "status",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.fields: Fields = []
        self._headers: CIMultiDict[str] | None = None
        self._connection: Connection | None = connection
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_over = False
        self._failure: tuple[type[OSError], str] | None = None  # not an exception: its traceback would lead back here
        self._timer: asyncio.TimerHandle | None = None
        self._longer: Callable[[], float | None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def headers(self) -> CIMultiDict[str]:
        """The answer's header fields."""
        if self._headers is None:
            self._headers = CIMultiDict(
                [
                    (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
                    for name, value in self.fields
                ]
            )
        return self._headers

    @property
    def content_type(self) -> str:
        """The content type in lower case and without parameters; empty if there is none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        """The length of the body in bytes; None if the head does not say."""
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    @property
    def is_read(self) -> bool:
        """Whether the answer has ended and all of it has been read."""
        return self._is_over and not self._chunks

    async def wait_head(self) -> None:
        """Wait for the head. Raises BrokeOff or TimeoutError. On an error or a cancellation the answer is closed."""
        try:
            while not self.status:
                if self._failure is not None:
                    self._fail(*self._failure)
                self._waiter = self._loop.create_future()
                await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None

    async def readany(self) -> bytes:
        """Return the part of the body that has come; empty at its end.

        Raises BrokeOff, or TimeoutError at the deadline, after all that came before has been read.
        """
        while not self._chunks:
            if self._failure is not None:
                self._fail(*self._failure)
            if self._is_over:
                return b""
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunks, self._chunks = self._chunks, []
        if self._size > 2 * READ_AHEAD_BYTES and self._connection is not None:
            self._connection.resume(self)
        self._size = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def set_deadline(self, time_s: float | None, longer: Callable[[], float | None] | None = None) -> None:
        """End the answer at `time_s` if it is incomplete; None: never. A timer costs less than asyncio.timeout.

        `longer`: is called then, and may return a later time.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._longer = longer
        if time_s is not None:
            self._timer = self._loop.call_at(time_s, self._expire)

    def _expire(self) -> None:
        if not self._is_over:
            if self._longer is not None and (later_s := self._longer()) is not None:
                self._timer = self._loop.call_at(later_s, self._expire)
                return
            self._failure = self._failure or (TimeoutError, "the deadline has passed")
            self.close()
            self._tell()

    def give_up(self) -> None:
        """End the answer if it still has a deadline, which means that none of it has been used yet."""
        if self._timer is not None and not self._is_over:
            self._failure = self._failure or (GivenUp, "the engine sleeps")
            self.close()
            self._tell()

    def close(self) -> None:
        """Release the answer. If it is not complete, its connection is closed."""
        self.set_deadline(None)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop(self)

    def _fail(self, kind: type[OSError], why: str) -> NoReturn:
        raise kind(why)

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- see Sink --------------------------------------------------------------------------------------------------

    def head(self, status: int, fields: Fields, now_s: float) -> None:
        """Take the head."""
        self.status, self.fields = status, fields
        self._tell()

    def body(self, data: bytes, now_s: float) -> None:
        """Take a piece of the body."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > 2 * READ_AHEAD_BYTES and self._connection is not None:
            self._connection.pause(self)
        if len(self._chunks) == 1:  # of several pieces that come together, the first wakes the reader
            self._tell()

    def end(self, now_s: float) -> None:
        """Mark the answer as complete. Its connection may serve another request by now."""
        self._is_over, self._connection = True, None
        self._tell()

    def lost(self, reason: str, now_s: float) -> None:
        """Record that the connection is lost, so nothing more comes."""
        self._failure, self._connection = self._failure or (BrokeOff, reason), None
        self._tell()


class EngineClient:
    """Sends requests to engines. No request waits for a free connection; admission bounds how many there are."""

    def __init__(self, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        """`tls`: for https. `connect_timeout_s`: seconds to make a connection, including TLS."""
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._pools: dict[tuple[str, int, bool], Pool] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def connections(self) -> int:
        """Number of connections to all engines, in use or not."""
        return sum(pool.size for pool in self._pools.values())

    async def post(
        self,
        target: Target,
        fields: bytes,
        body: bytes,
        on_sent: Callable[[], None],
        deadline_s: float,
        longer: Callable[[], float | None] | None = None,
    ) -> Answer:
        """Send a POST and return its answer once the head is here.

        `fields`: its header fields, except the host and the body's length. `on_sent` is called once the request is on
        its way or waits for a connection. The answer has until `deadline_s`, unless that is changed later or `longer`
        gives it more time (see `Answer.set_deadline`). Raises NotConnected, BrokeOff or TimeoutError. If this raises or
        is cancelled, the connection is closed already.

        A request is sent again, on a fresh connection, only if a kept connection was lost within STALE_S, before a byte
        of the answer: then the server has almost surely closed the idle connection at the same moment (RFC 9112,
        section 9.3.1). A generation that is done twice changes nothing. If the request is what broke the engine, the
        engine accepts no new connection, and the request is not sent again.
        """
        pool = self._pool(target)
        head = b"%b%bContent-Length: %d\r\n\r\n" % (target.head, fields, len(body))
        if (connection := pool.take()) is None:
            on_sent()
            answer = self._ask(await self._connect(pool, deadline_s), head, body, deadline_s, longer)
            await answer.wait_head()
            return answer
        sent_s = self._loop.time()
        answer = self._ask(connection, head, body, deadline_s, longer)
        on_sent()
        try:
            await answer.wait_head()
            return answer
        except BrokeOff:
            if connection.answered or self._loop.time() - sent_s > STALE_S:
                raise
            try:
                fresh = await self._connect(pool, deadline_s)
            except (NotConnected, TimeoutError):
                fresh = None
            if fresh is None:  # the engine is gone, perhaps because of this request: report the first error
                raise
        answer = self._ask(fresh, head, body, deadline_s, longer)
        await answer.wait_head()
        return answer

    def _ask(
        self,
        connection: Connection,
        head: bytes,
        body: bytes,
        deadline_s: float,
        longer: Callable[[], float | None] | None,
    ) -> Answer:
        """Send the request and return its answer, which has not begun yet."""
        answer = Answer(connection, self._loop)
        answer.set_deadline(deadline_s, longer)
        connection.request(head, body, answer)
        return answer

    async def upload(
        self,
        target: Target,
        fields: bytes,
        pieces: AsyncGenerator[bytes, None],
        on_sent: Callable[[], None],
        deadline_s: float,
    ) -> Answer:
        """Send a POST as `post` does, with a body that is sent as it comes and no faster than the engine takes it.

        It uses a fresh connection, since the body cannot be sent again. Also raises what `pieces` raises. If the engine
        answers with an error before all is sent, the sending ends.
        """
        on_sent()
        connection = await self._connect(self._pool(target), deadline_s)
        answer = Answer(connection, self._loop)
        answer.set_deadline(deadline_s)
        connection.begin(b"%b%bTransfer-Encoding: chunked\r\n\r\n" % (target.head, fields), answer)
        sending, head = asyncio.create_task(_send(connection, pieces)), asyncio.create_task(answer.wait_head())
        is_begun = False
        try:
            await asyncio.wait((sending, head), return_when=asyncio.FIRST_COMPLETED)
            if not head.done() or (head.exception() is None and answer.status < 300):
                await sending
            await head
            is_begun = True
        finally:
            sending.cancel()
            head.cancel()
            await asyncio.gather(sending, head, return_exceptions=True)
            if not is_begun:
                answer.close()
        return answer

    def give_up(self, target: Target) -> None:
        """End the requests that the engine has not begun to answer: they would hang until the engine is woken."""
        pool = self._pools.get((target.host, target.port, target.is_tls))
        for sink in pool.sinks() if pool is not None else ():
            if isinstance(sink, Answer):
                sink.give_up()

    def _pool(self, target: Target) -> Pool:
        key = (target.host, target.port, target.is_tls)
        pool = self._pools.get(key)
        if pool is None:
            address = Address(target.host, target.port, self._tls if target.is_tls else None)
            pool = self._pools[key] = Pool(address, self._loop.time, receive_bytes=READ_AHEAD_BYTES)
        return pool

    async def _connect(self, pool: Pool, deadline_s: float) -> Connection:
        """Open a connection. Raises NotConnected, or TimeoutError at the deadline."""
        timeout_at_s = self._loop.time() + self._connect_timeout_s
        try:
            async with asyncio.timeout_at(min(timeout_at_s, deadline_s)) as limit:
                return await pool.connect()
        except OSError as error:
            if not limit.expired():
                raise NotConnected(error.errno, str(error) or type(error).__name__) from None
            if timeout_at_s < deadline_s:
                raise ConnectTimedOut("no connection in time") from None
            raise

    async def keep(self) -> None:
        """Open connections ahead of need, as many as were in use lately, and drop the pools of engines now gone."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            await asyncio.gather(*(pool.renew() for pool in self._pools.values()))
            wanted: list[Pool] = []
            for key, pool in list(self._pools.items()):
                missing = pool.missing(FADES)
                wanted += [pool] * min(missing, OPENED_AHEAD - len(wanted))
                if not pool.size and not missing:
                    del self._pools[key]
            await asyncio.gather(*map(self._open_ahead, wanted))

    async def _open_ahead(self, pool: Pool) -> None:
        with contextlib.suppress(OSError):  # the next request meets the same error, and reports it
            async with asyncio.timeout(self._connect_timeout_s):
                await pool.open_ahead()

    async def close(self) -> None:
        """Close every connection."""
        with contextlib.suppress(TimeoutError):
            for pool in self._pools.values():
                await pool.close()


async def _send(connection: Connection, pieces: AsyncGenerator[bytes, None]) -> None:
    """Send a body until it or the connection ends."""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            if not await connection.send(piece):
                return
    connection.finish()
