"""The gateway's CPU time per request compared with a bare aiohttp proxy's, and the latency that each adds.

    python -m tests.bench.gateway.bench_gateway

Four kinds of process run on one machine, all on uvloop: scripted engines (one process, a port for each, raw protocol),
the gateway, the bare proxy of this file, and a load client (raw protocol). Each repeat measures both in turn, in
alternating order. CPU is the process's own user and system time. Prompts have 8 KB, 6 KB of which is one of eight
shared prefixes. An answer is one JSON text; a stream of 20 or 100 chunks that come together; or 20 chunks, 2 ms apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import aiohttp
import psutil
import uvloop
from aiohttp import web

MODULE = "tests.bench.gateway.bench_gateway"
KINDS = {"json": (0, 0.0), "stream": (20, 0.0), "long": (100, 0.0), "spread": (20, 0.002)}
"""Chunks of an answer (0: no stream), and the seconds between them."""
AIMS_US = {"json": (200, 135), "stream": (260, 185)}
"""CPU us per request: the gateway's target, and the bare proxy's figure on the machine where the target was set."""
FURTHER_CHUNK_AIM_US = 6.0
PROMPT_BYTES = 8192
SHARED_BYTES = 6144
PREFIXES = 8
RUN_S = 300
"""Limit for the requests of one run, on a busy machine."""
START_TRIES = 300
"""Attempts of another router's first request, 0.2 s apart."""
EVENT = (
    b"data: "
    + json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "delta": {"content": "token"}}]}).encode()
    + b"\n\n"
)
LAST_EVENTS = (
    b"data: "
    + json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}).encode()
    + b"\n\ndata: [DONE]\n\n"
)
CHUNK, LAST_CHUNK = (b"%x\r\n%b\r\n" % (len(data), data) for data in (EVENT, EVENT + LAST_EVENTS))
ABOUT = b"HTTP/1.1 200 OK\r\nx-warmroute-cached-tokens: 1536\r\nx-warmroute-prompt-tokens: 2048\r\n"
STREAM_HEAD = ABOUT + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "message": {"content": "token" * 20}}]}).encode()
WHOLE = ABOUT + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(TEXT), TEXT)
_KIND = re.compile(rb"kind=(\w+)")
"""The kind is in the prompt, because not every router passes on unknown headers or fields."""
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


# -- the scripted engines -------------------------------------------------------------------------------------------


class Engine(asyncio.Protocol):
    """A minimal engine: finds the end of each request, answers with constants."""

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
        asked = _KIND.search(rest)
        self.chunks, self.gap_s = KINDS[asked[1].decode()] if asked else (20, 0.0)
        self.chunk(0)

    def chunk(self, i: int) -> None:
        if self.transport.is_closing():
            return
        if not self.chunks:
            self.transport.write(WHOLE)
            return
        is_last = i == self.chunks - 1
        self.transport.write((STREAM_HEAD if i == 0 else b"") + (LAST_CHUNK if is_last else CHUNK))
        if is_last:
            self.transport.write(b"0\r\n\r\n")
        elif self.gap_s:
            asyncio.get_running_loop().call_later(self.gap_s, self.chunk, i + 1)
        else:
            self.chunk(i + 1)


async def run_engines(pods: int) -> None:
    """Run `pods` engines in one process; print their URLs."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda i=i: Engine(f"pod-{i}"), "127.0.0.1", 0) for i in range(pods)]  # type: ignore[misc]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(f"listening on {','.join(urls)}", flush=True)
    await asyncio.Event().wait()


# -- the bare proxy -------------------------------------------------------------------------------------------------


HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}


class BareProxy:
    """The work of any aiohttp proxy: read, forward to the next engine, copy chunks back."""

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
    """Serve the bare proxy; print its URL."""
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
        self.tail = self.tail[-8:] + data
        if self.tail.endswith((b"0\r\n\r\n", TEXT[-8:])):
            self.load.total_s.append(self.load.clock() - self.sent_s)
            self.send()


PATIENT = '{"probe_timeout_s": 30.0, "connect_timeout_s": 30.0}'


def chat(text: str, kind: str) -> bytes:
    """Return a request for an answer of that kind."""
    messages = [{"role": "user", "content": f"{text} kind={kind}"}]
    body = json.dumps({"model": "m", "stream": KINDS[kind][0] > 0, "messages": messages}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: */*\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Load:
    """A closed loop of `connections` clients over `count` requests."""

    def __init__(self, count: int, connections: int, kind: str) -> None:
        self.left = count
        self.kind = kind
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
        return chat(text, self.kind)

    def end(self, client: Client) -> None:
        self.open -= 1
        if not self.open:
            self.done.set()


async def run_load(url: str, count: int, connections: int, kind: str) -> None:
    """Send the requests; print the medians, and the whole answer's p99, in milliseconds as JSON."""
    host, port = url.removeprefix("http://").split(":")
    load = Load(count, connections, kind)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(load), host, int(port))
    async with asyncio.timeout(RUN_S):
        await load.done.wait()
    assert load.error is None, load.error
    assert len(load.total_s) == count, f"{count - len(load.total_s)} requests were cut off"
    first, total = statistics.median(load.first_byte_s), statistics.median(load.total_s)
    p99 = sorted(load.total_s)[int(0.99 * count)]
    print(json.dumps({"first_byte_ms": 1e3 * first, "total_ms": 1e3 * total, "p99_ms": 1e3 * p99}), flush=True)


# -- the comparison -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*command: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server process; yield the address that it prints, and the process."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), f"{command} did not start"
            yield line.removeprefix("listening on ").strip(), psutil.Process(process.pid)
        finally:
            process.kill()


OTHERS = {
    "sglang-router": ("-m", "sglang_router.launch_router", "--policy", "cache_aware", "--host", "127.0.0.1"),
    "vllm-router": ("-m", "vllm_router.launch_router", "--policy", "cache_aware", "--host", "127.0.0.1"),
}
"""Commands that start the other routers, by the name of their package."""


@contextlib.contextmanager
def other_router(name: str, engines: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """Start another router in front of the engines; yield its address and its process. Installs it if it is missing."""
    home = Path(tempfile.gettempdir()) / f"warmroute-bench-{name}"
    python, is_whole = home / "bin" / "python", home / "installed"
    if not is_whole.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([python, "-m", "pip", "--quiet", "install", name], check=True)
        is_whole.touch()
    about = subprocess.run([python, "-m", "pip", "show", name], capture_output=True, text=True, check=True)
    print(f"{name} {about.stdout.partition('Version: ')[2].partition(chr(10))[0]}", flush=True)
    with socket.socket() as free, socket.socket() as free_too:
        free.bind(("127.0.0.1", 0))
        free_too.bind(("127.0.0.1", 0))
        port, metrics_port = free.getsockname()[1], free_too.getsockname()[1]
    # Without its own port for metrics, the second router would find the first one's port in use.
    command: list[str] = [str(python), *OTHERS[name], "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", *engines]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_serving(name, url, process)
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


def _wait_serving(name: str, url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a request is answered: these routers report that they are healthy before they know an engine."""
    asked = chat("hello", "json").partition(b"\r\n\r\n")[2]
    said = "nothing"
    for _ in range(START_TRIES):
        assert process.poll() is None, f"{name} ended"
        request = urllib.request.Request(f"{url}/v1/chat/completions", asked, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
                return
        except urllib.error.HTTPError as error:
            said = f"{error.code} {error.read()[:300]!r}"
        except OSError as error:
            said = str(error)
        time.sleep(0.2)
    raise AssertionError(f"{name} answers no request: {said}")


def wait_ready(url: str, pods: int) -> None:
    """Wait until the gateway has its pods; fail after ten seconds."""
    asked = f"{url}/ready?engines={pods}"
    for _ in range(100):
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(asked, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError("the gateway is not ready")


def measure(url: str, process: psutil.Process | None, count: int, connections: int, kind: str) -> dict[str, float]:
    """Run the load client once; return its medians, and the CPU microseconds per request of `process`."""
    before = process.cpu_times() if process else None
    command = [sys.executable, "-m", MODULE, "load", url, str(count), str(connections), kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    if process and before:
        after = process.cpu_times()
        result["cpu_us"] = 1e6 * (after.user + after.system - before.user - before.system) / count
    return result


def compare(repeats: int, count: int, policy: str, pods: int, routers: list[str]) -> None:
    """Print the medians and the ratios for each kind of answer."""
    with contextlib.ExitStack() as running:
        engines, _ = running.enter_context(started(sys.executable, "-m", MODULE, "engines", str(pods)))
        python = (sys.executable, "-m")
        arms = [
            ("bare", *running.enter_context(started(*python, MODULE, "bare", engines))),
            (
                "gateway",
                *running.enter_context(
                    # A busy machine may stop everything for seconds, although the engines are well.
                    started(
                        *python,
                        "tests.router.rig.gateway_program",
                        PATIENT,
                        "--port=0",
                        "--engines",
                        engines,
                        "--policy",
                        policy,
                    )
                ),
            ),
            *((name, *running.enter_context(other_router(name, engines.split(",")))) for name in routers),
        ]
        wait_ready(arms[1][1], pods)
        runs: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
        for kind in KINDS:
            for _, url, _ in arms:
                measure(url, None, 200, 32, kind)
            for repeat in range(repeats):
                for name, url, process in arms if repeat % 2 else reversed(arms):
                    runs[name, kind].append(measure(url, process, count, 32, kind))
            for name, _, _ in arms:
                print(_row(name, kind, runs), flush=True)
        _further_chunks([name for name, _, _ in arms], runs)
        direct = engines.split(",")[0]
        alone: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(3):
            for name, url in [("direct", direct), *((name, url) for name, url, _ in arms)]:
                alone[name].append(measure(url, None, 60, 1, "stream"))
    base = statistics.median(run["first_byte_ms"] for run in alone["direct"])
    for name, _, _ in arms:
        first = statistics.median(run["first_byte_ms"] for run in alone[name])
        print(
            f"{name:14} adds {first - base:.2f} ms to the p50 of the first byte (one connection, {base:.2f} ms direct)"
        )


def _row(name: str, kind: str, runs: Mapping[tuple[str, str], list[dict[str, float]]]) -> str:
    """Return CPU and p99 of one arm, and both relative to the bare proxy's in the same repeat."""
    mine, bare = runs[name, kind], runs["bare", kind]
    ratios = {field: [m[field] / b[field] for m, b in zip(mine, bare, strict=True)] for field in ("cpu_us", "p99_ms")}
    middle = {field: statistics.median(run[field] for run in mine) for field in ("cpu_us", "p99_ms")}
    text = f"{kind:7} {name:14} CPU {middle['cpu_us']:6.0f} us a request, p99 {middle['p99_ms']:6.1f} ms"
    if name == "bare":
        return text
    spread = f"{min(ratios['cpu_us']):.2f} to {max(ratios['cpu_us']):.2f}"
    p99 = statistics.median(ratios["p99_ms"])
    text += f"; of bare's: CPU {statistics.median(ratios['cpu_us']):.2f} ({spread}), p99 {p99:.2f}"
    if name == "gateway" and kind in AIMS_US:
        aim, bare_aim = AIMS_US[kind]
        text += f" (aims {aim / bare_aim:.2f} and 1.5)"
    return text


def _further_chunks(names: list[str], runs: Mapping[tuple[str, str], list[dict[str, float]]]) -> None:
    chunks = KINDS["long"][0] - KINDS["stream"][0]
    for name in names:
        pairs = zip(runs[name, "long"], runs[name, "stream"], strict=True)
        each = statistics.median((long["cpu_us"] - short["cpu_us"]) / chunks for long, short in pairs)
        print(f"{name:14} CPU {each:.1f} us for each further chunk (aim {FURTHER_CHUNK_AIM_US:g})")


def main() -> None:
    """Run the comparison, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500, help="per run")
    parser.add_argument("--policy", default="predicted_ttft")
    parser.add_argument("--pods", type=int, default=8, help="engines behind each proxy; a decision looks at all")
    parser.add_argument(
        "--routers",
        nargs="*",
        default=[],
        choices=sorted(OTHERS),
        help="other routers for comparison: installed from PyPI into their own environment, under the temporary folder",
    )
    roles = parser.add_subparsers(dest="role")
    roles.add_parser("engines").add_argument("pods", type=int)
    roles.add_parser("bare").add_argument("urls")
    load = roles.add_parser("load")
    load.add_argument("url")
    load.add_argument("count", type=int)
    load.add_argument("connections", type=int)
    load.add_argument("kind", choices=KINDS)
    args = parser.parse_args()
    if args.role is None:
        compare(args.repeats, args.requests, args.policy, args.pods, args.routers)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.role == "engines":
            runner.run(run_engines(args.pods))
        elif args.role == "bare":
            runner.run(run_bare(args.urls.split(",")))
        else:
            runner.run(run_load(args.url, args.count, args.connections, args.kind))


if __name__ == "__main__":
    main()
