"""How a burst of requests passes through the gateway: one after another, or all together.

    python -m tests.bench.gateway.bench_burst

1,024 connections send a request of 8 KB each at the same moment. The scripted engines note when each request arrives,
and hold the answers until all have arrived. The gateway's CPU time is read from the kernel every millisecond, so the
comparison does not depend on its share of a core. The first burst finds no connection to the engines; later bursts use
those of the burst before.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvloop

from tests.bench.gateway.bench_gateway import MODELS, PROMPT_BYTES, started, wait_ready

MODULE = "tests.bench.gateway.bench_burst"
PREFIXES = 32
SHARED_BYTES = 6144
PAUSE_S = 1.0
"""Seconds between two bursts."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"token"}}]}\n\n'
ANSWER = HEAD + 4 * (b"%x\r\n%b\r\n" % (len(EVENT), EVENT)) + b"0\r\n\r\n"


class Burst:
    """What the engines saw of the current burst."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived_s: list[float] = []
        self.held: list[asyncio.Transport] = []
        self.connections = 0

    def arrived(self, transport: asyncio.Transport) -> None:
        """Note that a request is complete."""
        self.arrived_s.append(time.monotonic())
        self.held.append(transport)
        if len(self.held) == self.size:
            for held in self.held:
                held.write(ANSWER)
            print(json.dumps({"arrived_s": self.arrived_s, "connections": self.connections}), flush=True)
            self.arrived_s, self.held, self.connections = [], [], 0


class Engine(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pod: str, burst: Burst) -> None:
        self.pod = pod.encode()
        self.burst = burst
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.burst.connections += 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, rest = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        if head.startswith(b"GET"):
            self.buffer = rest
            about = b"x-warmroute-pod: %b\r\nx-warmroute-epoch: 1\r\ncontent-type: application/json\r\n" % self.pod
            self.transport.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (about, len(MODELS), MODELS))
            return
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) >= size:
            self.buffer = rest[size:]
            self.burst.arrived(self.transport)


async def run_engines(pods: int, size: int) -> None:
    """Run `pods` engines in one process; print their URLs, then a line for each burst."""
    loop, burst = asyncio.get_running_loop(), Burst(size)
    servers = [
        await loop.create_server(lambda pod=f"pod-{i}": Engine(pod, burst), "127.0.0.1", 0, backlog=1024)  # type: ignore[misc]
        for i in range(pods)
    ]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(f"listening on {','.join(urls)}", flush=True)
    await asyncio.Event().wait()


class Client(asyncio.Protocol):
    """One request on its own connection."""

    def __init__(self, request: bytes, tell: list[float]) -> None:
        self.request = request
        self.tell = tell
        self.tail = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.tail:
            assert data.startswith(b"HTTP/1.1 200"), data[:300]
        self.tail = self.tail[-4:] + data
        if self.tail.endswith(b"0\r\n\r\n"):
            self.tell.append(time.monotonic())
            self.done.set_result(None)


def _request(number: int) -> bytes:
    shared = f"system prompt number {number % PREFIXES} ".ljust(SHARED_BYTES, "s")
    fields = {
        "model": "m",
        "stream": True,
        "messages": [{"role": "user", "content": (shared + f"question {number} ").ljust(PROMPT_BYTES, "q")}],
    }
    body = json.dumps(fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: */*\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def run_client(url: str, size: int) -> None:
    """Send one burst; print when it began and when the last answer had arrived."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    ended_s: list[float] = []
    clients = [Client(_request(number), ended_s) for number in range(size)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, host, int(port))  # type: ignore[misc]
    await asyncio.sleep(0.2)  # until the gateway has accepted all connections
    began_s = time.monotonic()
    for client in clients:
        client.transport.write(client.request)
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.done for client in clients))
    print(json.dumps({"began_s": began_s, "ended_s": max(ended_s)}), flush=True)


class CpuSamples:
    """The CPU time of a process over time, in seconds."""

    def __init__(self, process_id: int) -> None:
        self._file = Path(f"/proc/{process_id}/schedstat")
        self.times_s: list[float] = []
        self.cpu_s: list[float] = []

    def look(self) -> None:
        """Take one sample."""
        self.cpu_s.append(int(self._file.read_text().split()[0]) / 1e9)
        self.times_s.append(time.monotonic())

    def at(self, time_s: float) -> float:
        """Return the CPU time up to `time_s`."""
        return self.cpu_s[min(bisect.bisect(self.times_s, time_s), len(self.cpu_s) - 1)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Sample every millisecond during the block."""
        over = threading.Event()

        def sample() -> None:
            while not over.wait(0.001):
                self.look()

        self.look()
        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.look()


def main() -> None:
    """Run the bursts, or one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bursts", type=int, default=6)
    parser.add_argument("--size", type=int, default=1024, help="requests of one burst")
    parser.add_argument("--pods", type=int, default=8)
    roles = parser.add_subparsers(dest="role")
    engines = roles.add_parser("engines")
    engines.add_argument("engine_pods", type=int)
    engines.add_argument("engine_size", type=int)
    client = roles.add_parser("client")
    client.add_argument("url")
    client.add_argument("client_size", type=int)
    args = parser.parse_args()
    if args.role == "engines":
        uvloop.run(run_engines(args.engine_pods, args.engine_size))
    elif args.role == "client":
        uvloop.run(run_client(args.url, args.client_size))
    else:
        measure(args.bursts, args.size, args.pods)


def measure(bursts: int, size: int, pods: int) -> None:
    """Print a line for each burst, and the medians."""
    rows: list[tuple[float, ...]] = []
    with subprocess.Popen(
        [sys.executable, "-m", MODULE, "engines", str(pods), str(size)], stdout=subprocess.PIPE, text=True
    ) as engines:
        try:
            assert engines.stdout is not None
            urls = engines.stdout.readline().removeprefix("listening on ").strip()
            with started(sys.executable, "-m", "router", "--port", "0", "--engines", urls) as (url, gateway):
                wait_ready(url, pods)
                print("      first at   half at   half by CPU  last at  all answered   CPU a request  connections made")
                for number in range(bursts):
                    samples = CpuSamples(gateway.pid)
                    with samples.taken():
                        command = [sys.executable, "-m", MODULE, "client", url, str(size)]
                        client = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                        seen = json.loads(engines.stdout.readline())
                    row = _row(client, seen, samples)
                    rows.append(row)
                    _print(str(number + 1), row)
                    time.sleep(PAUSE_S)
        finally:
            engines.kill()
    if len(rows) > 1:
        _print("of 2-", tuple(statistics.median(column) for column in zip(*rows[1:], strict=True)))
    print("aim: the first request is at its pod within 20 ms, half of them within half of the CPU time of all")


def _row(client: dict[str, float], seen: dict[str, list[float]], samples: CpuSamples) -> tuple[float, ...]:
    began_s, arrived = client["began_s"], seen["arrived_s"]
    before = samples.at(began_s)
    cpu = samples.at(client["ended_s"]) - before
    half = arrived[len(arrived) // 2]
    return (
        1e3 * (arrived[0] - began_s),
        1e3 * (half - began_s),
        (samples.at(half) - before) / cpu,
        1e3 * (arrived[-1] - began_s),
        1e3 * (client["ended_s"] - began_s),
        1e6 * cpu / len(arrived),
        float(cast(int, seen["connections"])),
    )


def _print(name: str, row: tuple[float, ...]) -> None:
    first, half, share, last, ended, cpu, made = row
    print(
        f"{name:5} {first:5.0f} ms  {half:6.0f} ms  {share:9.0%}  {last:8.0f} ms  {ended:8.0f} ms  {cpu:9.0f} us"
        f"  {made:12.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
