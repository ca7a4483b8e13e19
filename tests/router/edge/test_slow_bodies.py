"""Clients that announce bodies and send them late, slowly, or not at all; and bodies that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge import body, connection_limits
from router.edge.inflate import MAX_MEMBERS, OUTPUT_SLICE_BYTES, Inflater, NotCompressed
from router.startup.parts import ADMISSION, CONNECTIONS
from tests.router.rig.forms import TYPE, Part, written
from tests.router.rig.helpers import DEADLINE_S, ScriptedEngine, event, eventually, running, streams
from tests.router.rig.raw_client import connected, head

MIB = 2**20
GOOD = streams([event("fine"), b"data: [DONE]\n\n"])
ASK = orjson.dumps({"model": "m", "prompt": "x" * 5000, "stream": True})


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("k1\n")
    return str(path)


async def test_a_client_that_announces_bodies_and_sends_nothing_takes_no_room() -> None:
    engine = ScriptedEngine("a", GOOD)
    bound = {"max_in_flight_body_mib": 8, "max_body_bytes": 8 * MIB}
    async with running(engine, **bound) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            client = await stack.enter_async_context(connected(gateway))
            client.send(head(b"Content-Length: %d" % (8 * MIB)))
        await eventually(lambda: gateway.app[ADMISSION].in_flight == 8)
        assert gateway.app[ADMISSION].body_bytes == 0
        assert (await gateway.post(ASK)).status == 200


@pytest.mark.parametrize("framing", [b"Content-Length: 999999", b"Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_arrive_in_time_is_a_408_and_the_end_of_its_connection(framing: bytes) -> None:
    async with running(ScriptedEngine("a", GOOD), body_timeout_s=0.2) as gateway, connected(gateway) as client:
        client.send(head(framing) + b"5\r\nhello\r\n")
        answer = await client.answer()
        assert (answer.status, answer.error["type"]) == (408, "invalid_request_error")
        assert b"Connection: close" in answer.head
        assert await client.closed() == b""
        await eventually(lambda: gateway.in_flight == 0)


async def test_a_body_must_come_at_the_least_rate_and_may_take_its_time_at_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 2.0)
    async with running(ScriptedEngine("a", GOOD), body_min_rate=500) as gateway:
        async with connected(gateway) as slow:
            slow.send(head(b"Content-Length: %d" % len(ASK)) + ASK[:900])
            answer = await slow.answer()
        async with connected(gateway) as steady:
            steady.send(head(b"Content-Length: %d" % len(ASK)))
            for at in range(0, len(ASK), 1000):
                steady.send(ASK[at : at + 1000])
                await asyncio.sleep(0.5)
            assert b" 200 " in await steady.reader.readline()
    assert answer.status == 408
    assert "at least 1000 bytes" in answer.error["message"]


@pytest.mark.parametrize("kind", ["json", "form"])
async def test_with_a_least_rate_of_0_only_the_whole_body_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.1)
    sent, path, lines = ASK, b"/v1/completions", [b"Content-Length: %d" % len(ASK)]
    if kind == "form":
        sent, path = written([Part("model", b"m"), Part("file", b"sound" * 1000, "a.wav")]), b"/v1/audio/transcriptions"
        lines = [b"Content-Length: %d" % len(sent), b"Content-Type: " + TYPE]
    async with running(ScriptedEngine("a", GOOD), body_min_rate=0, body_timeout_s=5) as gateway:
        async with connected(gateway) as client:
            client.send(head(*lines, path=path) + sent[:10])
            await asyncio.sleep(1)
            client.send(sent[10:-10])
            await asyncio.sleep(1)
            client.send(sent[-10:])
            assert b" 200 " in await client.reader.readline()
        async with connected(gateway) as late:
            late.send(head(*lines, path=path) + sent[:10])
            answer = await late.answer()
    assert answer.status == 408
    assert answer.error["message"] == "the request's body did not arrive in time: it has 5 s"


async def test_the_rate_is_that_of_each_window_and_not_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.2)
    async with running(ScriptedEngine("a", GOOD), body_min_rate=1000) as gateway, connected(gateway) as client:
        client.send(head(b"Content-Length: 9000000") + b"x" * 4 * MIB)
        assert (await client.answer()).status == 408


@pytest.mark.parametrize("why", ["no key", "too large", "too many requests", "no room", "no such path"])
async def test_a_refused_body_is_not_read_on(why: str, monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    """The client gets its answer, and the connection closes although the client continues to send."""
    monkeypatch.setattr(connection_limits, "LINGER_S", 0.1)
    every: dict[str, dict[str, Any]] = {
        "no key": {"api_keys_file": keys},
        "too large": {"max_body_bytes": 2000},
        "too many requests": {"max_in_flight": 1},
        "no room": {"max_in_flight_body_mib": 1, "max_body_bytes": MIB},
        "no such path": {},
    }
    settings = every[why]
    wanted = {"no key": 401, "too large": 413, "too many requests": 429, "no room": 429, "no such path": 404}[why]
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, **settings) as gateway, connected(gateway) as first, connected(gateway) as client:
        if why in ("too many requests", "no room"):
            first.send(head(b"Content-Length: %d" % MIB) + b"x" * (MIB - 10))
            await eventually(lambda: gateway.app[ADMISSION].body_bytes == MIB - 10)
        path = b"/v1/nothing" if why == "no such path" else b"/v1/completions"
        client.send(head(b"Transfer-Encoding: chunked", path=path))
        sending = asyncio.create_task(send_on(client.writer))
        answer = await client.answer()
        await client.closed()
        sending.cancel()
        first.writer.transport.abort()
    assert answer.status == wanted
    assert b"Connection: close" in answer.head
    assert engine.received == []


async def send_on(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.005)


async def test_a_client_that_expects_100_continue_gets_it_only_when_its_body_is_wanted(keys: str) -> None:
    engine = ScriptedEngine("a", GOOD)
    lines = (b"Content-Length: %d" % len(ASK), b"Expect: 100-continue")
    async with running(engine, api_keys_file=keys) as gateway:
        async with connected(gateway) as client:
            client.send(head(*lines))
            assert (await client.answer()).status == 401
        async with connected(gateway) as client:
            client.send(head(*lines, b"Authorization: Bearer k1"))
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(ASK)
            assert b" 200 " in await client.reader.readline()
        async with connected(gateway) as client:
            client.send(head(b"Content-Length: 2", b"Expect: the worst", b"Authorization: Bearer k1") + b"{}")
            assert (await client.answer()).status == 417


@pytest.mark.realtime  # virtual time stands still while a task never waits
async def test_a_bomb_is_refused_at_the_bound_and_other_requests_get_their_turn_before() -> None:
    bomb = gzip.compress(b" " * 64 * MIB)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with running(ScriptedEngine("a", GOOD), max_body_bytes=16 * MIB) as gateway, connected(gateway) as client:
        client.send(head(b"Content-Encoding: gzip", b"Content-Length: %d" % len(bomb)) + bomb)
        while gateway.app[ADMISSION].in_flight != 1:  # noqa: ASYNC110  # `eventually` would let turns pass uncounted
            await asyncio.sleep(0)
        counting = asyncio.create_task(count())
        answer = await client.answer()
        counting.cancel()
    assert answer.status == 413
    assert turns >= 16 * MIB / OUTPUT_SLICE_BYTES / 2, "other tasks got no turn between slices"


async def test_a_body_whose_compression_makes_nothing_is_bounded_too() -> None:
    empty = b"\x00\x00\x00\xff\xff" * 1000  # empty stored blocks
    async with running(ScriptedEngine("a", GOOD), max_body_bytes=4000) as gateway, connected(gateway) as client:
        client.send(head(b"Content-Encoding: deflate", b"Transfer-Encoding: chunked"))
        client.send(b"%x\r\n%b\r\n" % (len(empty), empty))
        assert (await client.answer()).status == 413


async def test_an_unknown_compression_is_named() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        answer = await gateway.post(b"{}", **{"Content-Encoding": "br"})
    assert (answer.status, answer.json["error"]["param"]) == (415, "Content-Encoding")
    assert "gzip, deflate or identity" in answer.json["error"]["message"]


def compressed(data: bytes, how: str, cut: int) -> tuple[str, bytes]:
    if how == "members":
        return "gzip", gzip.compress(data[:cut]) + gzip.compress(data[cut:])
    if how == "gzip":
        return "gzip", gzip.compress(data)
    packer = zlib.compressobj(wbits=15 if how == "zlib" else -15)
    return "deflate", packer.compress(data) + packer.flush()


@given(
    st.binary(max_size=300) | st.integers(0, 3 * OUTPUT_SLICE_BYTES).map(bytes),
    st.sampled_from(["gzip", "members", "zlib", "raw"]),
    st.integers(1, 5000),
    st.integers(0, 300),
)
def test_what_is_inflated_is_what_was_compressed_in_slices(data: bytes, how: str, piece: int, cut: int) -> None:
    encoding, packed = compressed(data, how, cut)
    if how == "raw" and packed[0] & 0xF == 8:
        return  # the bytes look like zlib's, so nobody can tell
    inflater = Inflater(encoding)
    slices = [one for at in range(0, len(packed), piece) for one in inflater.inflate(packed[at : at + piece])]
    slices += inflater.finish()
    assert b"".join(slices) == data
    assert max(map(len, slices), default=0) <= OUTPUT_SLICE_BYTES


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate"]))
def test_anything_else_is_not_compressed(data: bytes, encoding: str) -> None:
    inflater = Inflater(encoding)
    with contextlib.suppress(NotCompressed):
        list(inflater.inflate(data))
        list(inflater.finish())


def test_members_are_bounded() -> None:
    with pytest.raises(NotCompressed, match="members"):
        list(Inflater("gzip").inflate(gzip.compress(b"") * (MAX_MEMBERS + 1)))


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_a_refused_body_is_read_as_far_as_the_largest_one_and_not_inflated(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds however long the gateway would wait for the end of the body."""
    monkeypatch.setattr(connection_limits, "LINGER_S", 10 * DEADLINE_S)
    monkeypatch.setattr(Inflater, "inflate", lambda *_: pytest.fail("a refused body is inflated"))
    async with running(ScriptedEngine("a", GOOD), max_body_bytes=2**16) as gateway, connected(gateway) as client:
        lines = [b"Content-Length: 1000000000000", *([b"Content-Encoding: gzip"] if encoding else [])]
        client.send(head(*lines))
        assert (await client.answer()).status == 413
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    client.send(b"x" * 2**14)
                    await client.writer.drain()
        await eventually(lambda: not gateway.app[CONNECTIONS].open)
        assert gateway.app[CONNECTIONS].refused == {"body": 1}
