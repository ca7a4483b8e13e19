"""The gateway's CPU time per streamed request beside a bare aiohttp proxy's, and the latency each adds.

    python -m tests.bench.bench_gateway

Four kinds of process on one machine, all on uvloop: scripted engines (one process, a port for each, raw protocol),
the gateway, the bare proxy of this file, and a load client (raw protocol). Each repeat measures both in turn, in either
order. CPU is the process's own user and system time. Prompts have 8 KB, 6 KB of it one of eight shared prefixes;
answers have 20 chunks, 2 ms apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import cast

import aiohttp
import psutil
import uvloop
from aiohttp import web

MODULE = "tests.bench.bench_gateway"
CHUNKS = 20
GAP_S = 0.002
PROMPT_BYTES = 8192
SHARED_BYTES = 6144
PREFIXES = 8
EVENT = (
    b"data: "
    + json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "delta": {"content": "token"}}]}).encode()
    + b"\n\n"
)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


# -- the scripted engines -------------------------------------------------------------------------------------------


class Engine(asyncio.Protocol):
    """As cheap as an engine can be: finds the end of each request, answers from constants."""

    def __init__(self, pod: str) -> None:
        self.pod = pod.encode()
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, rest = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        lower = head.lower()
        start = lower.find(b"content-length:")
        size = int(lower[start + 15 :].partition(b"\r\n")[0]) if start >= 0 else 0
        if len(rest) < size:
            return
        self.buffer = rest[size:]
        if head.startswith(b"GET"):
            about = b"x-warmroute-pod: %b\r\nx-warmroute-epoch: 1\r\ncontent-type: application/json\r\n" % self.pod
            self.transport.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (about, len(MODELS), MODELS))
            return
        self.chunk(0)

    def chunk(self, i: int) -> None:
        if self.transport.is_closing():
            return
        data = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
        if i == 0:
            data = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-warmroute-cached-tokens: 1536\r\n"
                b"x-warmroute-prompt-tokens: 2048\r\ntransfer-encoding: chunked\r\n\r\n" + data
            )
        if i == CHUNKS - 1:
            data += b"0\r\n\r\n"
        else:
            asyncio.get_running_loop().call_later(GAP_S, self.chunk, i + 1)
        self.transport.write(data)


async def run_engines(pods: int) -> None:
    """`pods` engines in one process; prints their URLs."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda i=i: Engine(f"pod-{i}"), "127.0.0.1", 0) for i in range(pods)]  # type: ignore[misc]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(f"listening on {','.join(urls)}", flush=True)
    await asyncio.Event().wait()


# -- the bare proxy -------------------------------------------------------------------------------------------------


HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}


class BareProxy:
    """What any aiohttp pass-through does: read, forward to the next engine, copy chunks back."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.turn = 0

    async def start(self, app: web.Application) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def stop(self, app: web.Application) -> None:
        await self.session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.turn += 1
        url = self.urls[self.turn % len(self.urls)] + request.path
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        async with self.session.post(url, data=body, headers=headers) as upstream:
            passed = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=passed)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


async def run_bare(urls: list[str]) -> None:
    """Serve the bare proxy; prints its URL."""
    proxy = BareProxy(urls)
    app = web.Application(client_max_size=2**24)
    app.on_startup.append(proxy.start)
    app.on_cleanup.append(proxy.stop)
    app.router.add_post("/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


# -- the load client ------------------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One connection: sends a request, waits for the last chunk, sends the next."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.tail = b""
        self.is_first = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def connection_lost(self, error: Exception | None) -> None:
        self.load.end(self)

    def send(self) -> None:
        request = self.load.next_request()
        if request is None:
            self.transport.close()
            return
        self.tail, self.is_first = b"", True
        self.sent_s = self.load.clock()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self.is_first:
            self.is_first = False
            if not data.startswith(b"HTTP/1.1 200"):
                self.load.error = repr(data[:300])
                self.load.done.set()
            self.load.first_byte_s.append(self.load.clock() - self.sent_s)
        self.tail = self.tail[-4:] + data
        if self.tail.endswith(b"0\r\n\r\n"):
            self.load.total_s.append(self.load.clock() - self.sent_s)
            self.send()


class Load:
    """A closed loop of `connections` clients over `count` requests."""

    def __init__(self, count: int, connections: int) -> None:
        self.left = count
        self.first_byte_s: list[float] = []
        self.total_s: list[float] = []
        self.open = connections
        self.error: str | None = None
        self.done = asyncio.Event()
        self.clock = time.perf_counter  # uvloop's own clock counts in milliseconds

    def next_request(self) -> bytes | None:
        if not self.left:
            return None
        self.left -= 1
        shared = f"system prompt number {self.left % PREFIXES} ".ljust(SHARED_BYTES, "s")
        text = (shared + f"question {self.left} ").ljust(PROMPT_BYTES, "q")
        fields = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
        body = json.dumps(fields).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def end(self, client: Client) -> None:
        self.open -= 1
        if not self.open:
            self.done.set()


async def run_load(url: str, count: int, connections: int) -> None:
    """Send the requests; prints the medians in milliseconds as JSON."""
    host, port = url.removeprefix("http://").split(":")
    load = Load(count, connections)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(load), host, int(port))
    async with asyncio.timeout(120):
        await load.done.wait()
    assert load.error is None, load.error
    assert len(load.total_s) == count, f"{count - len(load.total_s)} requests were cut off"
    first, total = statistics.median(load.first_byte_s), statistics.median(load.total_s)
    print(json.dumps({"first_byte_ms": 1e3 * first, "total_ms": 1e3 * total}), flush=True)


# -- the comparison -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*command: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server process; its address, as it prints it, and the process."""
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), f"{command} did not start"
            yield line.removeprefix("listening on ").strip(), psutil.Process(process.pid)
        finally:
            process.kill()


def wait_ready(url: str, pods: int) -> None:
    """Until the gateway has its pods; fails after ten seconds."""
    asked = f"{url}/ready?engines={pods}"
    for _ in range(100):
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(asked, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError("the gateway is not ready")


def measure(url: str, process: psutil.Process | None, count: int, connections: int) -> dict[str, float]:
    """One run of the load client: its medians, and CPU microseconds per request of `process`."""
    before = process.cpu_times() if process else None
    command = [sys.executable, "-m", MODULE, "load", url, str(count), str(connections)]
    result: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if process and before:
        after = process.cpu_times()
        result["cpu_us"] = 1e6 * (after.user + after.system - before.user - before.system) / count
    return result


def compare(repeats: int, count: int, policy: str, pods: int) -> None:
    """Print the medians and the ratio."""
    me = MODULE
    with (
        started(me, "engines", str(pods)) as (engines, _),
        started(me, "bare", engines) as (bare_url, bare),
        started("router", "--port", "0", "--engines", engines, "--policy", policy) as (gateway_url, gateway),
    ):
        arms = [("bare", bare_url, bare), ("gateway", gateway_url, gateway)]
        wait_ready(gateway_url, pods)
        for _, url, _ in arms:
            measure(url, None, 200, 32)
        cpu: dict[str, list[float]] = {"bare": [], "gateway": []}
        for repeat in range(repeats):
            for name, url, process in arms if repeat % 2 else reversed(arms):
                cpu[name].append(measure(url, process, count, 32)["cpu_us"])
        direct = engines.split(",")[0]
        urls = {"direct": direct, "bare": bare_url, "gateway": gateway_url}
        alone: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
        for _ in range(3):
            for name, url in urls.items():
                alone[name].append(measure(url, None, 60, 1))
    ratios = [g / b for g, b in zip(cpu["gateway"], cpu["bare"], strict=True)]
    for name in ("bare", "gateway"):
        print(f"{name:8} CPU {statistics.median(cpu[name]):6.0f} us per request (32 connections)")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"ratio    {statistics.median(ratios):.2f} (median of {repeats}; {spread}; target 1.5)")
    base = statistics.median(run["first_byte_ms"] for run in alone["direct"])
    for name in ("bare", "gateway"):
        first = statistics.median(run["first_byte_ms"] for run in alone[name])
        print(
            f"{name:8} adds {first - base:.2f} ms to the p50 of the first byte (one connection, {base:.2f} ms direct)"
        )


def main() -> None:
    """The comparison, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500, help="per run")
    parser.add_argument("--policy", default="predicted_ttft")
    parser.add_argument("--pods", type=int, default=4, help="engines behind both; a decision looks at each")
    roles = parser.add_subparsers(dest="role")
    roles.add_parser("engines").add_argument("pods", type=int)
    roles.add_parser("bare").add_argument("urls")
    load = roles.add_parser("load")
    load.add_argument("url")
    load.add_argument("count", type=int)
    load.add_argument("connections", type=int)
    args = parser.parse_args()
    if args.role is None:
        compare(args.repeats, args.requests, args.policy, args.pods)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.role == "engines":
            runner.run(run_engines(args.pods))
        elif args.role == "bare":
            runner.run(run_bare(args.urls.split(",")))
        else:
            runner.run(run_load(args.url, args.count, args.connections))


if __name__ == "__main__":
    main()
