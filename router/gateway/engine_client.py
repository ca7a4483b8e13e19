"""Requests to engines: an answer as it comes, over connections that are kept and made ahead of need."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import NoReturn

from multidict import CIMultiDict

from engine.contract.http.connection import Connection, Fields
from engine.contract.http.pool import Address, Pool
from engine.contract.http.target import Target

READ_AHEAD_BYTES = 2**14
"""Of an answer whose client is slow: in the socket, and twice as much here. 30 MB/s at a round trip of 0.5 ms."""
STALE_S = 0.25
"""A request on a used connection that is lost this soon, without a byte of an answer, crossed the server's closing of
the connection on its way."""
KEEP_EVERY_S = 0.5
OPENED_AHEAD = 32
"""Connections opened at once, to all engines together: at most 1 % of a core's time. That keeps 300 open to vLLM and
SGLang, which close them after 5 s."""
FADES = 0.5 ** (KEEP_EVERY_S / 30)
"""How many connections are kept open is halved in 30 s."""


class NotConnected(OSError):
    """No connection came about."""


class ConnectTimedOut(NotConnected):
    """Nor did a refusal, in time."""


class BrokeOff(ConnectionError):
    """The connection went before the answer was complete, or what came is not HTTP."""


class GivenUp(TimeoutError):
    """The engine sleeps: nobody waits for it any longer."""


class Answer:
    """An answer that comes in. Nothing more is read while READ_AHEAD_BYTES of it wait, twice."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_failure",
        "_headers",
        "_is_over",
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
        self._failure: tuple[type[OSError], str] | None = None  # no exception: its traceback would lead back here
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def headers(self) -> CIMultiDict[str]:
        """Its header fields."""
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
        """In lower case and without parameters; empty where it has none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        """The body's bytes, where the head says so."""
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    @property
    def is_read(self) -> bool:
        """Whether it has come to its end, and all of it has been read."""
        return self._is_over and not self._chunks

    async def begun(self) -> None:
        """Until the head is here. Raises BrokeOff and TimeoutError."""
        while not self.status:
            if self._failure is not None:
                self._fail(*self._failure)
            await self._news()

    async def readany(self) -> bytes:
        """What has come of the body; empty at its end.

        Raises BrokeOff, or TimeoutError at the deadline, once all that came before is read.
        """
        while not self._chunks:
            if self._failure is not None:
                self._fail(*self._failure)
            if self._is_over:
                return b""
            await self._news()
        chunks, self._chunks = self._chunks, []
        if self._size > 2 * READ_AHEAD_BYTES and self._connection is not None:
            self._connection.resume(self)
        self._size = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def set_deadline(self, time_s: float | None) -> None:
        """End it then, where it is not complete; None: never. A timer alone costs less than asyncio's timeout."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if time_s is not None:
            self._timer = self._loop.call_at(time_s, self._expire)

    def _expire(self) -> None:
        if not self._is_over:
            self._failure = self._failure or (TimeoutError, "the deadline has passed")
            self.close()
            self._tell()

    def give_up(self) -> None:
        """End it, where it still has a deadline: then nothing of it has been of use yet."""
        if self._timer is not None and not self._is_over:
            self._failure = self._failure or (GivenUp, "the engine sleeps")
            self.close()
            self._tell()

    def close(self) -> None:
        """Be done with it: where it is not complete, its connection is closed."""
        self.set_deadline(None)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop(self)

    def _fail(self, kind: type[OSError], why: str) -> NoReturn:
        raise kind(why)

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- see Sink --------------------------------------------------------------------------------------------------

    def head(self, status: int, fields: Fields, now_s: float) -> None:
        """The head has come."""
        self.status, self.fields = status, fields
        self._tell()

    def body(self, data: bytes, now_s: float) -> None:
        """A piece of the body has come."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > 2 * READ_AHEAD_BYTES and self._connection is not None:
            self._connection.pause(self)
        self._tell()

    def end(self, now_s: float) -> None:
        """It is complete, and its connection may be another's by now."""
        self._is_over, self._connection = True, None
        self._tell()

    def lost(self, reason: str, now_s: float) -> None:
        """Nothing more comes."""
        self._failure, self._connection = self._failure or (BrokeOff, reason), None
        self._tell()


class EngineClient:
    """Sends requests to engines. Their number is bounded by the requests in flight; none waits for a connection."""

    def __init__(self, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        """`tls`: for https. `connect_timeout_s`: seconds for a connection, TLS included."""
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._pools: dict[tuple[str, int, bool], Pool] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def connections(self) -> int:
        """To all engines, in use or not."""
        return sum(pool.size for pool in self._pools.values())

    async def post(
        self, target: Target, fields: bytes, body: bytes, on_sent: Callable[[], None], deadline_s: float
    ) -> Answer:
        """Send a POST; its answer, of which the head is here.

        `fields`: its header fields, but for the host and the body's length. `on_sent` is told once the request is on
        its way, or waits for a connection. The answer has until `deadline_s`, or what it is set to later. Raises
        NotConnected, BrokeOff and TimeoutError. When this raises or is cancelled, the connection is closed already.

        A request goes out a second time, on a fresh connection, only where the first one was a kept connection that was
        lost within STALE_S, before a byte of the answer: then the server has, all but surely, closed the idle
        connection at the same moment (RFC 9112, section 9.3.1). A generation that is done twice changes nothing. Where
        the request is what broke the engine, nobody listens any more, and it is not sent again.
        """
        pool = self._pool(target)
        head = b"%b%bContent-Length: %d\r\n\r\n" % (target.head, fields, len(body))
        if (connection := pool.take()) is None:
            on_sent()
            return await self._exchange(await self._connect(pool, deadline_s), head, body, deadline_s)
        sent_s = self._loop.time()
        try:
            return await self._exchange(connection, head, body, deadline_s, on_sent)
        except BrokeOff:
            if connection.answered or self._loop.time() - sent_s > STALE_S:
                raise
            try:
                fresh = await self._connect(pool, deadline_s)
            except (NotConnected, TimeoutError):
                fresh = None
            if fresh is None:  # the engine is gone, perhaps because of this request: what it did first is what counts
                raise
        return await self._exchange(fresh, head, body, deadline_s)

    async def _exchange(
        self,
        connection: Connection,
        head: bytes,
        body: bytes,
        deadline_s: float,
        on_sent: Callable[[], None] | None = None,
    ) -> Answer:
        answer = Answer(connection, self._loop)
        answer.set_deadline(deadline_s)
        connection.request(head, body, answer)
        if on_sent is not None:
            on_sent()
        try:
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        return answer

    def give_up(self, target: Target) -> None:
        """End what an engine was asked and has not begun to answer: it would hang until the engine is woken."""
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
        """Raises NotConnected, and TimeoutError at the deadline."""
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
        """Open connections ahead of need, as many as were in use lately, and forget those of engines that are gone."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            wanted: list[Pool] = []
            for key, pool in list(self._pools.items()):
                missing = pool.missing(FADES)
                wanted += [pool] * min(missing, OPENED_AHEAD - len(wanted))
                if not pool.size and not missing:
                    del self._pools[key]
            await asyncio.gather(*map(self._open_ahead, wanted))

    async def _open_ahead(self, pool: Pool) -> None:
        with contextlib.suppress(OSError):  # the next request finds out, and says so
            async with asyncio.timeout(self._connect_timeout_s):
                await pool.open_ahead()

    async def close(self) -> None:
        """Close every connection."""
        with contextlib.suppress(TimeoutError):
            for pool in self._pools.values():
                await pool.close()
