"""How a connection reads a server's bytes, wherever they are split, and whether it may be reused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.http.connection import (
    LARGE_BODY_BYTES,
    MAX_OVERHEAD_BYTES,
    SMALL_BODY_BYTES,
    Connection,
    Fields,
)
from engine.common.http.pool import MARGIN_S, MAX_IDLE_S, Address, Pool


class Transport(asyncio.Transport):
    """Records written data."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unsent = 0
        self.is_aborted = False
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Heard:
    """A sink that records its calls."""

    def __init__(self) -> None:
        self.status = 0
        self.fields: Fields = []
        self.data = b""
        self.pieces: list[bytes] = []
        self.outcome = "open"

    def head(self, status: int, fields: Fields, now_s: float) -> None:
        assert (self.status, self.outcome) == (0, "open")
        self.status, self.fields = status, fields

    def body(self, data: bytes, now_s: float) -> None:
        assert self.status, "a body before its head"
        assert self.outcome == "open"
        self.data += data
        self.pieces.append(data)

    def end(self, now_s: float) -> None:
        assert self.outcome == "open"
        self.outcome = "end"

    def lost(self, reason: str, now_s: float) -> None:
        assert self.outcome == "open"
        self.outcome = reason


class Exchange:
    """A connection that has sent a request."""

    def __init__(self, clock_s: list[float] | None = None) -> None:
        times = clock_s or [0.0]
        self.pool = Pool(Address("nowhere", 1), lambda: times[0])
        self.connection, self.transport, self.heard = Connection(self.pool), Transport(), Heard()
        self.connection.connection_made(self.transport)
        self.connection.request(b"POST", b"", self.heard)

    def read(self, pieces: Iterable[bytes]) -> Exchange:
        for piece in pieces:
            self.connection.data_received(piece)
        return self

    @property
    def is_kept(self) -> bool:
        return self.connection in self.pool._idle and not self.connection.closed


HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\n"
LENGTH = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
KEPT = {
    "length": (LENGTH, b"hello"),
    "chunked": (CHUNKED, b"hello"),
    "trailers": (CHUNKED[:-2] + b"X-Sum: 5\r\n\r\n", b"hello"),
    "after 1xx": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH, b"hello"),
    "204": (HEAD.replace(b"200 OK", b"204 No Content") + b"\r\n", b""),
}
CLOSED = {
    "connection: close": (LENGTH.replace(b"X-A: 1", b"Connection: close"), b"hello"),
    "HTTP/1.0": (LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0"), b"hello"),
}


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    ends = [0, *sorted({position % len(data) for position in at} - {0}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@given(st.sampled_from(list((KEPT | CLOSED).items())), st.lists(st.integers(0, 300)))
def test_a_response_is_the_same_however_it_is_cut(case: tuple[str, tuple[bytes, bytes]], at: list[int]) -> None:
    name, (sent, body) = case
    exchange = Exchange().read(cut(sent, at))
    assert (exchange.heard.outcome, exchange.heard.data) == ("end", body)
    if name in KEPT:
        assert exchange.heard.fields[:2] == [(b"X-A", b"1"), (b"x-a", b"2")]
    assert exchange.is_kept == (name in KEPT)
    assert exchange.transport.is_aborted == (name in CLOSED)


@pytest.mark.parametrize("coding", [b"", b"Transfer-Encoding: gzip\r\n"])
def test_without_a_length_the_body_ends_with_the_connection(coding: bytes) -> None:
    for error in (None, ConnectionResetError("reset")):
        exchange = Exchange().read([HEAD + coding + b"\r\nhel", b"lo"])
        assert exchange.heard.outcome == "open"
        exchange.connection.connection_lost(error)
        assert exchange.heard.data == b"hello"
        assert (exchange.heard.outcome == "end") == (error is None)


@pytest.mark.parametrize("sent", [b"", HEAD, LENGTH[:-1], CHUNKED[:-2]])
def test_an_end_in_the_middle_is_a_loss(sent: bytes) -> None:
    exchange = Exchange().read([sent] if sent else [])
    exchange.connection.connection_lost(None)
    assert exchange.heard.outcome == "the server closed the connection"
    assert exchange.connection.answered == bool(sent)


BAD = {
    "no HTTP": b"SSH-2.0\r\n",
    "no chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx",
    "control characters": b"HTTP/1.1 200 OK\r\nX: \x01\r\n\r\n",
}
ENDLESS = {
    "status line": (b"HTTP/1.1 200 ", b"O" * 1000),
    "field": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 1000),
    "fields": (b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 995 + b"\r\n"),
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\nX: " + b"x" * 900 + b"\r\n\r\n"),
    "trailers": (CHUNKED[:-2], b"X: " + b"x" * 995 + b"\r\n"),
}


@pytest.mark.parametrize("sent", BAD.values(), ids=BAD)
def test_what_is_not_http_is_a_loss_at_once(sent: bytes) -> None:
    exchange = Exchange().read([sent])
    assert exchange.heard.outcome.startswith("not HTTP")
    assert exchange.transport.is_aborted


def test_what_one_read_brings_of_a_body_is_one_piece_and_comes_before_the_loss() -> None:
    exchange = Exchange()
    exchange.read([HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n2\r\nbc\r\n"])
    assert exchange.heard.pieces == [b"abc"]
    exchange.read([b"1\r\nd\r\n1\r\ne\r\nno size\r\n"])
    assert exchange.heard.pieces == [b"abc", b"de"]
    assert exchange.heard.outcome.startswith("not HTTP")


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=ENDLESS)
def test_what_is_no_body_is_bounded(begin: bytes, more: bytes) -> None:
    exchange = Exchange().read([begin] if begin else [])
    for _ in range(MAX_OVERHEAD_BYTES // 900 + 1):
        exchange.read([more])
    assert exchange.heard.outcome.startswith("not HTTP")
    assert exchange.transport.is_aborted


@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([LENGTH, CHUNKED, *BAD.values()])), max_size=5))
def test_no_bytes_are_too_odd(pieces: list[bytes]) -> None:
    exchange = Exchange().read(pieces)
    exchange.connection.connection_lost(None)
    assert exchange.heard.outcome != "open"
    assert not exchange.pool._open


@pytest.mark.parametrize("more", [b"x", LENGTH, b"\r\nHTTP/1.1 408 Request Timeout\r\n\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
def test_more_than_was_asked_for_spoils_the_connection_and_not_the_response(more: bytes, at_once: bool) -> None:
    exchange = Exchange().read([LENGTH + more] if at_once else [LENGTH, more])
    assert (exchange.heard.outcome, exchange.heard.data) == ("end", b"hello")
    assert exchange.transport.is_aborted
    assert exchange.pool.take() is None


def test_a_server_that_answers_before_it_has_read_all_is_not_asked_again() -> None:
    exchange = Exchange()
    exchange.transport.unsent = 1
    exchange.read([LENGTH])
    assert (exchange.heard.outcome, exchange.is_kept) == ("end", False)


async def test_a_large_body_goes_out_in_pieces_and_no_further_than_the_answer() -> None:
    exchange, heard = Exchange(), Heard()
    exchange.read([LENGTH])
    connection = exchange.pool.take()
    assert connection is not None
    body = bytes(range(256)) * (2 * LARGE_BODY_BYTES // 256)
    exchange.transport.written = b""
    connection.request(b"HEAD", body, heard)
    connection.pause_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert 0 < len(exchange.transport.written) < len(body)
    connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert exchange.transport.written == b"HEAD" + body
    exchange.read([LENGTH])
    assert (heard.outcome, exchange.is_kept) == ("end", True)

    early = Heard()
    again = exchange.pool.take()
    assert again is connection
    exchange.transport.written = b""
    connection.request(b"HEAD", body, early)
    connection.pause_writing()
    await asyncio.sleep(0)
    exchange.read([LENGTH.replace(b"200 OK", b"413 No")])
    assert (early.status, early.outcome, exchange.is_kept) == (413, "end", False)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(exchange.transport.written) < len(body)


@pytest.mark.parametrize("size", [0, 1, SMALL_BODY_BYTES, SMALL_BODY_BYTES + 1, LARGE_BODY_BYTES])
def test_a_request_is_sent_as_it_is(size: int) -> None:
    exchange = Exchange().read([LENGTH])
    connection = exchange.pool.take()
    assert connection is not None
    exchange.transport.written = b""
    connection.request(b"HEAD\r\n", b"b" * size, Heard())
    assert exchange.transport.written == b"HEAD\r\n" + b"b" * size


def test_what_is_dropped_hears_no_more_and_a_connection_that_went_on_is_left_alone() -> None:
    exchange = Exchange().read([LENGTH[:-2]])
    exchange.connection.drop(exchange.heard)
    exchange.read([b"lo"])
    exchange.connection.connection_lost(None)
    assert (exchange.heard.outcome, exchange.heard.data) == ("open", b"hel")

    done = Exchange().read([LENGTH])
    done.connection.drop(done.heard)
    assert done.is_kept


def test_a_connection_whose_reader_was_slow_is_read_again_when_it_is_idle() -> None:
    exchange = Exchange().read([LENGTH[:-2]])
    exchange.connection.pause(exchange.heard)
    assert exchange.transport.is_paused
    exchange.read([b"lo"])  # these bytes were read before the pause
    assert (exchange.is_kept, exchange.transport.is_paused) == (True, False)


# -- the pool --------------------------------------------------------------------------------------------------------


def test_a_servers_idle_timeout_is_learnt_from_connections_that_it_ends() -> None:
    now_s = [100.0]
    exchange = Exchange(now_s).read([LENGTH])
    pool = exchange.pool
    now_s[0] += 2.0
    exchange.connection.connection_lost(None)
    assert pool.kept_s == 2.0
    for idle_s, is_used in ((2.0 - MARGIN_S, True), (2.0 - MARGIN_S + 0.01, False)):
        connection = Connection(pool)
        connection.connection_made(Transport())
        connection.request(b"", b"", Heard())
        connection.data_received(LENGTH)
        now_s[0] += idle_s
        assert (pool.take() is connection) == is_used


def test_a_connection_that_is_still_open_shows_that_the_server_keeps_them_longer() -> None:
    now_s = [100.0]
    exchange = Exchange(now_s).read([LENGTH])
    pool, kept_s = exchange.pool, exchange.pool.kept_s
    now_s[0] += kept_s + 10
    assert pool.take() is None  # the connection has been idle longer than servers are known to allow
    assert pool.kept_s == kept_s + 10
    assert not exchange.connection.closed
    second = Connection(pool)
    second.connection_made(Transport())
    second.request(b"", b"", Heard())
    second.data_received(LENGTH)
    now_s[0] += kept_s + 5
    assert pool.take() is second
    now_s[0] += MAX_IDLE_S
    assert pool.take() is None
    assert exchange.connection.closed


def test_connections_that_are_too_old_for_use_are_closed_but_for_one() -> None:
    now_s = [100.0]
    exchange = Exchange(now_s)
    pool, more = exchange.pool, [Connection(exchange.pool) for _ in range(5)]
    for connection in more:
        connection.connection_made(Transport())
        connection.request(b"", b"", Heard())
    for connection in [exchange.connection, *more]:
        connection.data_received(LENGTH)
        now_s[0] += 0.01
    now_s[0] += pool.kept_s - MARGIN_S
    assert pool.take() is None
    assert [connection.closed for connection in [exchange.connection, *more]] == [False, *[True] * 5]


async def test_connections_made_ahead_serve_after_used_ones_and_teach_nothing_of_keeping() -> None:
    now_s = [100.0]
    exchange = Exchange(now_s)
    pool, fresh = exchange.pool, [Connection(exchange.pool) for _ in range(2)]
    for connection in fresh:
        connection.connection_made(Transport())
    waiting = list(fresh)

    async def connect() -> Connection:
        return waiting.pop(0)

    pool.connect = connect  # type: ignore[method-assign]
    for _ in fresh:
        await pool.open_ahead()
    exchange.read([LENGTH])
    assert pool.take() is exchange.connection
    kept_s = pool.kept_s
    now_s[0] += 2 * kept_s
    assert pool.take() is fresh[1]
    fresh[0].connection_lost(None)
    assert pool.take() is None
    assert pool.kept_s == kept_s


def test_the_pool_misses_as_many_connections_as_were_in_use_lately() -> None:
    now_s = [100.0]
    pool = Exchange(now_s).pool
    used = [Connection(pool) for _ in range(7)]
    for connection in used:
        assert pool.take() is None
        connection.connection_made(Transport())
        connection.request(b"", b"", Heard())
    assert pool.missing(1.0) == 0
    for connection in used:
        connection.connection_lost(None)
    assert pool.missing(1.0) == 7
    assert pool.missing(0.5) == 3
    assert pool.missing(0.1) == 0
