"""Memory of a gateway, in a process of its own, whose clients do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import orjson
import psutil
import pytest

pytestmark = pytest.mark.realtime
MIB = 2**20
READERS = 500
GROUP = 50
LOGPROBS = {"tokens": ["token"] * 1000, "token_logprobs": [-1.25] * 1000}
ANSWER = orjson.dumps({"choices": [{"text": "x" * 7000, "logprobs": [LOGPROBS] * 600}]})
BODY = orjson.dumps({"model": "m", "prompt": "y " * 120_000})
BUDGETS_MIB = 128 + 128
READER_MIB = 0.35
"""MiB that one reader may cost besides the budgets: buffers of two connections, and memory that the allocator keeps.
0.19 to 0.25 were seen. A whole answer has 4 MiB."""
DEADLINE_S = 240.0


@pytest.fixture
def no_blocking_calls() -> None:
    """Allow blocking calls, such as reading /proc. The gateway under test is another process here."""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve an engine's side of one connection. The kernel buffers little that the gateway does not read."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    models = orjson.dumps({"data": [{"id": "m"}]})
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            asked = await reader.readuntil(b"\r\n\r\n")
            if asked.startswith(b"GET"):
                writer.write(head % len(models) + models)
                continue
            await reader.readexactly(len(BODY))
            writer.write(head % len(ANSWER))
            for at in range(0, len(ANSWER), 2**15):
                writer.write(ANSWER[at : at + 2**15])
                await writer.drain()
    writer.close()


WAITS = ("connect_timeout_s", "probe_timeout_s", "body_timeout_s")


@contextlib.asynccontextmanager
async def _gateway(engine_port: int, *flags: str) -> AsyncIterator[tuple[int, int, int]]:
    """Yield the gateway's process id, its port, and the port of its metrics."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.router.rig.gateway_program",
        json.dumps({"body_min_rate": 0, **dict.fromkeys(WAITS, 900.0)}),
        "--port=0",
        "--metrics-port=0",
        "--engines",
        f"http://127.0.0.1:{engine_port}",
        *flags,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        lines = [await asyncio.wait_for(process.stdout.readline(), 60) for _ in range(2)]
        port, metrics_port = (int(line.decode().strip().removesuffix("/metrics").rpartition(":")[2]) for line in lines)
        yield process.pid, port, metrics_port
    finally:
        process.kill()
        await process.wait()


async def _metric(port: int, name: str) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def _peak_mib(pid: int) -> float:
    """Return the largest resident sets so far of a process and of those that it started, together."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
    lines = [line for one in pids for line in Path(f"/proc/{one}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(round(DEADLINE_S / 0.5)):
        if await condition():
            return
        await asyncio.sleep(0.5)
    raise AssertionError("it did not come true in time")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory of a process on Linux alone")
@pytest.mark.timeout(2 * DEADLINE_S)
async def test_readers_that_take_nothing_cost_the_budgets_and_little_more() -> None:
    """Bodies take 115 MiB. Answers take at most their budget, which does not count bytes that the kernel has taken."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=READERS)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
    engine = await asyncio.start_server(_answer, sock=listening, limit=MIB)
    patient = ("--idle-timeout-s", "900", "--first-byte-timeout-s", "900")
    loop = asyncio.get_running_loop()
    clients: list[socket.socket] = []
    try:
        async with (
            engine,
            _gateway(listening.getsockname()[1], *patient) as (pid, port, metrics_port),
            asyncio.timeout(DEADLINE_S),
        ):

            async def is_ready() -> bool:
                return await _metric(metrics_port, "warmroute_gateway_pods_admitted") == 1

            async def is_full() -> bool:
                taken = await _metric(metrics_port, "warmroute_gateway_answer_bytes")
                return taken > 50 * MIB and await _metric(metrics_port, "warmroute_gateway_in_flight") == READERS

            await _until(is_ready)

            async def are_there() -> bool:
                return await _metric(metrics_port, "warmroute_gateway_in_flight") >= len(clients)

            idle = _peak_mib(pid)
            for _ in range(READERS):
                client = socket.socket()
                clients.append(client)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(BODY)
                await loop.sock_sendall(client, head + BODY)
                if len(clients) % GROUP == 0:  # more at once would be refused, because they would wait too long
                    await _until(are_there)
            await _until(is_full)
            sizes = [idle, _peak_mib(pid)]
            while sizes[-1] > sizes[-2] + 1:  # until every answer has been passed on as far as its reader lets it
                await asyncio.sleep(5)
                sizes.append(_peak_mib(pid))
            bodies = await _metric(metrics_port, "warmroute_gateway_body_bytes") / MIB
    finally:
        for client in clients:
            client.close()
    print(f"{bodies:.0f} MiB of bodies; largest resident sets so far, MiB: {sizes}")
    assert bodies > 100
    assert sizes[-1] < idle + BUDGETS_MIB + READERS * READER_MIB, sizes


LARGE = 8
PROMPT_BYTES = 15 * MIB + 900_000
BODY_FACTOR = 4
"""MiB of memory per MiB of bodies in flight, as values.yaml and --max-in-flight-body-mib say. 3.4 were seen."""
KINDS = {
    "text": orjson.dumps({"model": "m", "prompt": "x" * PROMPT_BYTES}),
    "text of which one character is not Latin": orjson.dumps(
        {"model": "alias", "prompt": "\U0001f600" + "x" * PROMPT_BYTES}
    ),
    "as many values as are read": b'{"model":"alias","x":[%b,%b],"prompt":"%b"}'
    % (b",".join([b"[]"] * 130_000), b",".join([b'"\xc3\xbcx"'] * 900_000), b"x" * 8 * MIB),
    "empty lists": b'{"model":"alias","prompt":"x","x":[' + b"[]," * (5 * MIB) + b"1]}",
}


async def _taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve an engine's side of one connection: it takes a request and never answers."""
    models = orjson.dumps({"data": [{"id": "m"}]})
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
        while await reader.read(MIB):
            pass
    writer.close()


def _request(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory of a process on Linux alone")
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("kind", KINDS)
async def test_bodies_take_no_more_memory_than_the_chart_says(kind: str) -> None:
    """All of the bodies that may be in flight are there at once."""
    body = KINDS[kind]
    engine = await asyncio.start_server(_taken, "127.0.0.1", 0)
    patient = ("--idle-timeout-s", "900", "--first-byte-timeout-s", "900", "--model-alias", "alias=m")
    writers: list[asyncio.StreamWriter] = []
    async with (
        engine,
        _gateway(engine.sockets[0].getsockname()[1], *patient) as (pid, port, metrics_port),
        asyncio.timeout(DEADLINE_S),
    ):

        async def is_ready() -> bool:
            return await _metric(metrics_port, "warmroute_gateway_pods_admitted") == 1

        async def send(request: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(request)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    return (await reader.readuntil(b"\r\n"))[9:12]
            return b""

        await _until(is_ready)
        assert await send(_request(b'{"x":[' + b"[]," * 20_000 + b"1]}")) == b"400"  # the reader process is there
        idle = _peak_mib(pid)
        statuses = await asyncio.gather(*(send(_request(body)) for _ in range(LARGE)))
        peak = _peak_mib(pid)
        for writer in writers:
            writer.transport.abort()
    await asyncio.sleep(0.2)  # until the engine sees the end of its connections
    print(f"{LARGE} bodies of {len(body) / MIB:.0f} MiB: {idle:.0f} MiB idle, {peak:.0f} at most; answers {statuses}")
    assert statuses == [b"400" if kind == "empty lists" else b""] * LARGE
    assert peak - idle < (64 if kind == "empty lists" else BODY_FACTOR * LARGE * len(body) / MIB + 64)
