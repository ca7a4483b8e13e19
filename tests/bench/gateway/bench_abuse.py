"""What a polite client suffers while another client takes more than its part.

    python -m tests.bench.gateway.bench_abuse --seconds 8 values limited

The gateway, the abuse and this process, with the engine and the polite client, are three processes. The polite client
sends ten chats of 2 KB a second on a kept connection, and asks `/health` on a new connection after each. For each abuse
a gateway is started anew. The line shows the polite client's latency in ms alone and beside the abuse, the health
checks that failed, the share of a core that the gateway used beside the abuse, and its largest resident set so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

import orjson

from tests.router.rig.helpers import ScriptedEngine, answers

MIB = 2**20
PAUSE_S = 0.1
CONNECTIONS = 4
SILENT = 600
DEADLINE_S = 30.0
POLITE = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a polite question. " * 100}]})
ANSWER = orjson.dumps({"choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": {}})
TENANTS = f"""tenants:
  - name: polite
    keys: [{{sha256: {sha256(b"polite").hexdigest()}}}]
  - name: limited
    keys: [{{sha256: {sha256(b"limited").hexdigest()}}}]
    requests_per_minute: 1
"""


def request(body: bytes, key: str, path: str = "/v1/chat/completions") -> bytes:
    """Return a POST with its body."""
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# -- abuses: each sends as fast as it can on one connection, until the gateway closes it -------------------------------


statuses: Counter[bytes] = Counter()
"""Answers to the abuse."""


async def repeat(port: int, data: bytes) -> None:
    """Send the same data again and again. A refusal ends the connection; then the next begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(data)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            statuses[head.split(b" ", 2)[1]] += 1
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            if b"connection: close" in head.lower():
                break
    writer.transport.abort()


async def values(port: int) -> None:
    """Send 16 MiB of lists in a field, by an alias, so that the gateway has to change the body."""
    body = b'{"model":"alias","x":[' + b"[]," * (5 * MIB) + b'1],"messages":[{"role":"user","content":"x"}]}'
    await repeat(port, request(body, "polite"))


async def most(port: int) -> None:
    """Send as many objects as are read."""
    body = b'{"model":"alias","x":[' + b'{"a":1},' * 60_000 + b'1],"messages":[{"role":"user","content":"x"}]}'
    await repeat(port, request(body, "polite"))


async def limited(port: int) -> None:
    """Send 4 MiB of messages as a tenant that may send one request a minute."""
    message = {"role": "user", "content": "word, " * 1000}
    await repeat(port, request(orjson.dumps({"model": "m", "messages": [message] * 700}), "limited"))


@cache
def chunked(key: str, size: int) -> bytes:
    """Return a request with a body in chunks of that size."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    data = orjson.dumps({"model": "m", "prompt": "x" * MIB})
    pieces = (data[at : at + size] for at in range(0, len(data), size))
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def chunks(port: int) -> None:
    """Send a body in chunks of one byte."""
    await repeat(port, chunked("polite", 1))


async def allowed(port: int) -> None:
    """Send a body in the smallest chunks that are read."""
    await repeat(port, chunked("polite", 240))


async def texts(port: int) -> None:
    """Send 15 MiB of text by an alias."""
    await repeat(port, large())


@cache
def large() -> bytes:
    """Return that request."""
    return request(
        orjson.dumps({"model": "alias", "prompt": "some words, " * (15 * MIB // 12)}), "polite", "/v1/completions"
    )


async def nested(port: int) -> None:
    """Send 200 KB of messages with many parts, below the size from which JSON is counted."""
    part = {"type": "text", "text": "a"}
    messages = [{"role": "user", "content": [part] * 1000}] * 8
    await repeat(port, request(orjson.dumps({"model": "m", "messages": messages}), "polite"))


async def zipped(port: int) -> None:
    """Send 15 MiB of zeros, compressed."""
    await repeat(port, bomb())


@cache
def bomb() -> bytes:
    """Return that request."""
    data = gzip.compress(b'{"model":"m","prompt":"' + b"0" * 15 * MIB + b'"}', 9)
    asked = request(data, "polite", "/v1/completions")
    return asked.replace(b"Host: g", b"Host: g\r\nContent-Encoding: gzip", 1)


async def stranger(port: int) -> None:
    """The same without a valid key."""
    await repeat(port, chunked("unknown", 1))


async def silent(port: int) -> None:
    """Open connections and send nothing."""
    opened = []
    for _ in range(SILENT // CONNECTIONS):
        with contextlib.suppress(OSError):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
        await asyncio.sleep(0.005)
    await asyncio.sleep(5)
    for _, writer in opened:
        writer.transport.abort()


async def redis(port: int) -> None:
    """Ask for a named cache, which is in a Redis that stands still."""
    body = {"model": "m", "cached_content": "caches/" + "a" * 32, "messages": [{"role": "user", "content": "x"}]}
    await repeat(port, request(orjson.dumps(body), "polite"))


ABUSES: dict[str, Callable[[int], Awaitable[None]]] = {
    abuse.__name__: abuse
    for abuse in (values, most, nested, texts, zipped, limited, chunks, allowed, stranger, silent, redis)
}


async def abuse(name: str, port: int) -> None:
    """Repeat one abuse on several connections, until the process is killed."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await ABUSES[name](port)
            await asyncio.sleep(0.001)

    async def tell() -> None:
        while True:
            await asyncio.sleep(1)
            print(orjson.dumps({status.decode(): count for status, count in statuses.items()}).decode(), flush=True)

    await asyncio.gather(tell(), *(one() for _ in range(CONNECTIONS)))


# -- the polite client -------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the polite client has seen."""

    latency_s: list[float] = field(default_factory=list)
    failed: int = 0
    """Requests that were not answered 200."""
    unhealthy: int = 0
    """Health checks that failed or took more than two seconds."""

    def at(self, share: float) -> float:
        """Return a quantile of the latency in ms."""
        return sorted(self.latency_s)[int(share * (len(self.latency_s) - 1))] * 1000 if self.latency_s else float("inf")


async def polite(port: int, seconds: float) -> Seen:
    """Send requests for some seconds. Each begins at its time, whatever became of the one before."""
    seen, until_s = Seen(), time.monotonic() + seconds
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                writer.write(request(POLITE, "polite"))
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            seen.failed += not head.startswith(b"HTTP/1.1 200")
        except (OSError, asyncio.IncompleteReadError):
            seen.failed += 1
            writer.transport.abort()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        seen.latency_s.append(time.monotonic() - began_s)
        seen.unhealthy += not await is_healthy(port)
        await asyncio.sleep(max(0.0, began_s + PAUSE_S - time.monotonic()))
    writer.transport.abort()
    return seen


async def is_healthy(port: int) -> bool:
    """Ask /health as a kubelet does: on a new connection, with two seconds."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer.startswith(b"HTTP/1.1 200")
    except OSError:
        return False


# -- the gateway -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a Python program until the end of the block."""
    started = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


@contextlib.asynccontextmanager
async def gateway(engine: str, redis_port: int | None) -> AsyncIterator[tuple[int, int]]:
    """Yield the process id and the port of a gateway that is ready."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tenants").write_text(TENANTS)
        flags = ["--port=0", f"--engines={engine}", f"--tenants-file={folder}/tenants", "--model-alias=alias=m"]
        if redis_port is not None:
            flags.append(f"--redis-url=redis://127.0.0.1:{redis_port}")
        async with process("-m", "tests.router.rig.gateway_program", "{}", *flags) as started:
            assert started.stdout is not None
            port = int((await started.stdout.readline()).rpartition(b":")[2])
            deadline_s = time.monotonic() + DEADLINE_S
            while (await polite(port, 0.01)).failed:
                assert time.monotonic() < deadline_s, "the gateway does not serve"
                await asyncio.sleep(0.2)
            yield started.pid, port


async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a Redis that takes connections and never answers."""
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> int:
    """Return the largest resident set of a process so far, in MiB."""
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


async def measure(name: str, seconds: float) -> None:
    """Print one line."""
    engine = ScriptedEngine("a", answers(200, ANSWER))
    await engine.start()
    still = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    redis_port = still.sockets[0].getsockname()[1] if name == "redis" else None
    async with gateway(engine.url, redis_port) as (pid, port):
        alone = await polite(port, seconds)
        async with process("-m", "tests.bench.gateway.bench_abuse", "--abuse", name, "--port", str(port)) as abusing:
            assert abusing.stdout is not None
            await abusing.stdout.readline()
            began_s, spent_s = time.monotonic(), cpu_s(pid)
            beside = await polite(port, seconds)
            busy = (cpu_s(pid) - spent_s) / (time.monotonic() - began_s)
            abusing.kill()
            *_, last = (b"{}", *(await abusing.stdout.read()).split())
        print(
            f"{name:9} alone p50 {alone.at(0.5):6.1f} p99 {alone.at(0.99):6.1f}   beside p50 {beside.at(0.5):7.1f} "
            f"p99 {beside.at(0.99):7.1f}   ratio {beside.at(0.99) / alone.at(0.99):6.1f}   failed {beside.failed} of "
            f"{len(beside.latency_s)}   unhealthy {beside.unhealthy}   gateway's core {busy:.0%}   "
            f"peak {resident_mib(pid)} MiB   abuse answered {last.decode()}   load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    still.close()
    await engine.stop()


async def main(names: Sequence[str], seconds: float) -> None:
    """Measure each abuse in turn."""
    for name in names:
        await measure(name, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ABUSES), help=f"of {', '.join(ABUSES)}; default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--abuse", choices=ABUSES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if given.abuse else 1024, hard))
    asyncio.run(abuse(given.abuse, given.port) if given.abuse else main(given.names, given.seconds))
