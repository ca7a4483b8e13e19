"""What a request costs before it is paid for: a refused body is neither parsed nor kept, and the next request is
served."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.edge import body_flow
from router.edge.body_flow import FREE_FRAMING_BYTES, KEPT_BYTES, BodyFlow
from router.edge.connection_limits import DROPPED_BYTES_PER_S, ClientConnections, ConnectionLimits
from router.edge.fifo import PLACES
from router.edge.turns import Turns
from router.fleet.lack import Lacks
from router.startup.parts import CONNECTIONS
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, eventually, running
from tests.router.rig.raw_client import RawClient, connected, head

MIB = 2**20
GOOD = answers(200, b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}')
PATHS = (b"/v1/completions", b"/v1/messages", b"/v1/embeddings", b"/v1/audio/transcriptions", b"/v1/caches")
LINES = {name: b"Authorization: Bearer " + name.encode() for name in ("limited", "free", "stranger")}


@pytest.fixture
def tenants(tmp_path: Path, no_blocking_calls: object) -> str:
    no_blocking_calls.deactivate()  # type: ignore[attr-defined]
    keys = {name: sha256(name.encode()).hexdigest() for name in ("limited", "free")}
    path = tmp_path / "tenants"
    path.write_text(
        f"tenants:\n  - name: limited\n    keys: [{{sha256: {keys['limited']}}}]\n    requests_per_minute: 1\n"
        f"  - name: free\n    keys: [{{sha256: {keys['free']}}}]\n"
    )
    return str(path)


def chunked(data: bytes, sizes: list[int]) -> bytes:
    """Return the data in chunks of these sizes, repeated."""
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        piece = data[at : at + size]
        pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        at += size
    return b"".join(pieces) + b"0\r\n\r\n"


async def ask(client: RawClient, who: str, body: bytes) -> int:
    client.send(head(b"Content-Length: %d" % len(body), LINES[who]) + body)
    return (await client.answer()).status


@contextlib.asynccontextmanager
async def at_its_limit(tenants: str) -> AsyncIterator[tuple[Gateway, ScriptedEngine]]:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, tenants_file=tenants) as gateway, connected(gateway) as client:
        assert await ask(client, "limited", b'{"model":"m","prompt":"x"}') == 200
        engine.received.clear()
        yield gateway, engine


BODIES = st.sampled_from(
    [
        b"",
        b"{",
        b"[]" * 100,
        b'{"model":"m","prompt":"x"}',
        b'{"model":"m","prompt":"%b"}' % (b"x" * 200_000),
        b'{"x":[' + b"[]," * 300_000 + b"1]}",
    ]
)


@pytest.mark.parametrize(("who", "status"), [("limited", 429), ("stranger", 401)])
async def test_a_refused_body_is_not_read(tenants: str, who: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it has come, whatever it is, and however it comes."""

    def parse(body: bytes) -> None:
        raise AssertionError("a refused body was parsed")

    async with at_its_limit(tenants) as (gateway, engine):
        monkeypatch.setattr("router.reading.inbound.parse_body", parse)
        monkeypatch.setattr("router.stored.named_caches.parse_body", parse)
        for body in (b"", b"{", b'{"model":"m"}', b"x" * 200_000, b'{"x":[' + b"[]," * MIB + b"1]}"):
            for framing, sent in (
                (b"Content-Length: %d" % len(body), body),
                (b"Transfer-Encoding: chunked", chunked(body, [1, 3])),
                (b"Transfer-Encoding: chunked", chunked(body, [50_000])),
            ):
                for path in PATHS:
                    async with connected(gateway) as client:
                        client.send(head(framing, LINES[who], path=path) + sent[: len(sent) // 2])
                        assert (await client.answer()).status == status
                        client.send(sent[len(sent) // 2 :])
                await eventually(lambda: gateway.in_flight == 0)
        assert not engine.received


async def test_the_connection_goes_on_after_a_short_refused_body_and_ends_after_a_long_one(tenants: str) -> None:
    async with at_its_limit(tenants) as (gateway, _), connected(gateway) as client:
        for _ in range(3):
            assert await ask(client, "limited", b"x" * 5000) == 429
            assert await ask(client, "free", b'{"model":"m","prompt":"x"}') == 200
        for size, sent in ((MIB, 100), (MIB, KEPT_BYTES + 10_000), (MIB, MIB), (100_000, 100_000)):
            long = b"x" * size
            async with connected(gateway) as other:
                other.send(head(b"Content-Length: %d" % len(long), LINES["limited"]) + long[:sent])
                answer = await other.answer()
                assert (answer.status, b"Connection: close" in answer.head) == (429, True)
                other.send(long[sent:])
                assert await other.closed() == b""
        assert gateway.app[CONNECTIONS].refused["body"] == 0


async def test_a_body_that_no_one_wants_yet_stops_coming(tenants: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the tenant's account is asked, the client's bytes wait in the kernel."""
    waiting = asyncio.Event()

    async def wait(taking: object) -> object:
        await waiting.wait()
        return taking

    engine = ScriptedEngine("a", GOOD)
    body = orjson.dumps({"model": "m", "prompt": "x" * 8 * MIB})
    async with running(engine, tenants_file=tenants) as gateway, connected(gateway) as client:
        monkeypatch.setattr("router.tenants.limiter.Taking.__aenter__", wait)
        monkeypatch.setattr("router.tenants.limiter.Taking.headers", lambda taking: {})
        monkeypatch.setattr("router.tenants.limiter.Taking.needs", lambda *args: asyncio.sleep(0))
        client.send(head(b"Content-Length: %d" % len(body), LINES["limited"]) + body)
        await eventually(lambda: gateway.in_flight == 1)
        await asyncio.sleep(0.3)
        (connection,) = (one for one in gateway.app[CONNECTIONS].open if one._is_busy)  # type: ignore[attr-defined]
        assert len(connection._flow._kept) <= KEPT_BYTES + 2**18  # type: ignore[attr-defined]
        waiting.set()
        assert (await client.answer()).status == 200


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(BODIES, st.sampled_from(["length", "chunked"])), min_size=1, max_size=4),
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.lists(st.integers(1, 70_000), min_size=1, max_size=5),
)
def test_requests_on_one_connection_are_read_whole_in_order_however_they_come(
    requests: list[tuple[bytes, str]], chunks: list[int], cuts: list[int]
) -> None:
    """Also if many come in one packet, or a packet ends anywhere."""

    async def test() -> None:
        sent = b""
        for number, (body, framing) in enumerate(requests):
            data = b'{"model":"m","number":%d,"prompt":"%b"}' % (number, body.replace(b'"', b"'"))
            way = b"Content-Length: %d" % len(data) if framing == "length" else b"Transfer-Encoding: chunked"
            sent += head(way) + (data if framing == "length" else chunked(data, [size + 500 for size in chunks]))
        engine = ScriptedEngine("a", GOOD)
        async with running(engine) as gateway, connected(gateway) as client:
            at = number = 0
            while at < len(sent):
                size = cuts[number % len(cuts)]
                client.send(sent[at : at + size])
                at, number = at + size, number + 1
                await asyncio.sleep(0)
            for _ in requests:
                assert (await client.answer()).status == 200
        numbers = [orjson.loads(one.body)["number"] for one in engine.received]
        assert numbers == list(range(len(requests)))

    asyncio.run(test())


@pytest.mark.parametrize("sizes", [[1], [1, 2], [7], [3, 30], [40]])
async def test_tiny_chunks_are_refused_and_cost_little(sizes: list[int]) -> None:
    body = orjson.dumps({"model": "m", "prompt": "x" * MIB})
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        async with connected(gateway) as client:
            client.send(head(b"Transfer-Encoding: chunked") + chunked(body, sizes))
            answer = await client.answer()
            assert answer.status == 400
            assert "chunks are too small" in answer.error["message"]
            assert await client.closed() == b""
        async with connected(gateway) as client:
            client.send(head(b"Transfer-Encoding: chunked") + chunked(body, [1024]))
            assert (await client.answer()).status == 200
        short = orjson.dumps({"model": "m", "prompt": "x" * 9000})
        async with connected(gateway) as client:
            client.send(head(b"Transfer-Encoding: chunked") + chunked(short, sizes))
            assert (await client.answer()).status == 200
    assert [len(one.body) for one in engine.received] == [len(body), len(short)]


class Counting:
    """A parser that counts what it gets."""

    is_full = False

    def __init__(self) -> None:
        self.parsed = bytearray()
        self.goes_on = True

    def parse(self, data: bytes) -> bool:
        self.parsed += data
        return b"\r\n\r\n" in self.parsed

    def receive(self, go_on: bool) -> None:
        self.goes_on = go_on


@given(st.binary(min_size=1, max_size=200_000), st.lists(st.integers(1, 70_000), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_until_it_is_wanted_a_body_costs_the_parser_a_little_at_most(body: bytes, cuts: list[int]) -> None:
    parser = Counting()
    flow = BodyFlow(parser, lambda: None, Turns())
    start = b"POST / HTTP/1.1\r\nHost: g\r\n\r\n"
    data, at, number = start + body, 0, 0
    while at < len(data):
        size = cuts[number % len(cuts)]
        flow.came(data[at : at + size])
        at, number = at + size, number + 1
    assert data.startswith(bytes(parser.parsed))
    assert len(parser.parsed) <= len(start) + body_flow.LITTLE_BYTES
    assert parser.goes_on or len(body) > KEPT_BYTES
    assert flow.drop(10 * MIB)
    assert parser.goes_on
    assert flow.came(b"x" * MIB)
    assert not flow.came(b"x" * 10 * MIB)
    assert len(parser.parsed) <= len(start) + body_flow.LITTLE_BYTES


async def test_a_stranger_costs_little_more_than_a_head(tenants: str) -> None:
    async def cpu_s(key: str, sent: bytes) -> float:
        async with connected(gateway) as client:
            began_s = time.thread_time()
            client.send(head(b"Transfer-Encoding: chunked", LINES[key]) + sent)
            await client.answer()
            return time.thread_time() - began_s

    data = orjson.dumps({"model": "m", "prompt": "x" * (2 * FREE_FRAMING_BYTES)})
    async with at_its_limit(tenants) as (gateway, _):
        large = min([await cpu_s("stranger", chunked(data, [2**16])) for _ in range(10)])
        tiny = min([await cpu_s("stranger", chunked(data, [1])) for _ in range(10)])
    assert tiny < 3 * large + 0.005, (tiny, large)


CACHE = "caches/" + "a" * 32
NEED_REDIS = {
    "a named cache": ("POST", "/v1/chat/completions", {"model": "m", "cached_content": CACHE, "messages": []}),
    "a conversation": ("POST", "/v1/responses", {"model": "m", "conversation": "c", "input": "x"}),
    "a response": ("GET", "/v1/responses/resp_1", None),
    "a list of caches": ("GET", "/v1/caches", None),
    "a new cache": ("POST", "/v1/caches", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "a renewal": ("PATCH", f"/v1/{CACHE}", {"ttl": "60s"}),
    "a limit": ("POST", "/v1/completions", {"model": "m", "prompt": "x"}),
}


@pytest.mark.parametrize("what", NEED_REDIS)
async def test_a_redis_that_stands_still_holds_only_requests_that_need_it(tenants: str, what: str) -> None:
    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()

    method, path, fields = NEED_REDIS[what]
    body = b"" if fields is None else orjson.dumps(fields)
    lines = (LINES["limited" if what == "a limit" else "free"], b"Content-Length: %d" % len(body))
    start = head(*lines).replace(b"POST /v1/completions", f"{method} {path}".encode())
    redis = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{redis.sockets[0].getsockname()[1]}"
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, tenants_file=tenants, redis_url=url) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(40):
            client = await stack.enter_async_context(connected(gateway))
            client.send(start + body)
        async with connected(gateway) as client:
            began_s = time.monotonic()
            assert await ask(client, "free", b'{"model":"m","prompt":"x"}') == 200
            assert time.monotonic() - began_s < 0.45, "with 4 places held for 0.1 s each, it would take 1 s"
    redis.close()


async def test_bodies_that_wait_for_turns_hold_no_place_in_the_fifo(monkeypatch: pytest.MonkeyPatch) -> None:
    """More compressed bodies than places: none goes on, and a light request is answered."""
    goes_on, waiting = asyncio.Event(), 0

    async def turn(_: Turns) -> None:
        nonlocal waiting
        waiting += 1
        await goes_on.wait()

    zipped = gzip.compress(orjson.dumps({"model": "m", "prompt": "x" * MIB}))
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        monkeypatch.setattr(Turns, "turn", turn)
        sent = {"Content-Encoding": "gzip"}
        heavy = [asyncio.create_task(gateway.post(zipped, **sent)) for _ in range(2 * PLACES)]
        await eventually(lambda: waiting == 2 * PLACES)
        assert (await gateway.post({"model": "m", "prompt": "x"})).status == 200
        goes_on.set()
        assert {answer.status for answer in await asyncio.gather(*heavy)} == {200}


async def test_refused_bodies_are_received_at_a_bounded_pace() -> None:
    limits = ConnectionLimits(1, 1.0, 1.0, 1.0, 100, 2**30)
    connections, loop = ClientConnections(limits, Lacks()), asyncio.get_running_loop()
    began_s = loop.time()
    pauses = [connections.dropped(2**18) for _ in range(1024)]
    assert pauses[0] <= 2**18 / DROPPED_BYTES_PER_S + 1e-6
    assert pauses[-1] + loop.time() - began_s >= 1024 * 2**18 / DROPPED_BYTES_PER_S - 1e-6
    await asyncio.sleep(60)
    assert connections.dropped(2**18) <= pauses[0] + 1e-6  # what was not used is not saved up
