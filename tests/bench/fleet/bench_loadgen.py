"""The cost of the load generator: CPU per streamed request, lag, memory, and the gain of a second process.

    python -m tests.bench.fleet.bench_loadgen [--rate 1000] [--memory-requests 200000]

The server is `mock_engine.py`, a process of its own on another core. Prompts have about 8 KB, most of it shared. The
bare client is aiohttp's with the same prompts, schedule and events: it shows what a generator built on aiohttp costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, replace

import aiohttp
import numpy as np
import orjson
import psutil
import uvloop

from engine.common.sse import SseDecoder
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.load.client import Client
from loadgen.load.player import ArmRun, RunSpec, play
from loadgen.load.target import Target
from loadgen.load.workers import play_parallel
from loadgen.measure.records import RequestRecord
from loadgen.workloads.published import PrefixRepetition
from loadgen.workloads.render import Renderer
from tests.bench.gateway.mock_engine import mock_engine, pin

TOKENS_PER_WORD = 1.4
WORKLOAD = PrefixRepetition(prefix_len=1600, suffix_len=192, num_prefixes=8, output_len=16)
CHUNKS, GAP_S = 16, 0.02
MEMORY_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of this process, and the lag of requests."""

    requests: int
    seconds: float
    cpu_us: float
    lag_p50_ms: float
    lag_p99_ms: float

    def __str__(self) -> str:
        return (
            f"{self.requests / self.seconds:7.0f} requests/s  {self.cpu_us:5.0f} us CPU/request"
            f"  lag p50 {self.lag_p50_ms:6.2f} ms  p99 {self.lag_p99_ms:6.2f} ms"
        )


def spec_of(arrivals: ArrivalSpec, sessions: int, first: int = 0) -> RunSpec:
    return RunSpec(arrivals, seed=1, time_limit_s=3600.0, sessions=sessions, first_session=first)


async def ours(url: str, arrivals: ArrivalSpec, requests: int) -> Cost:
    async with Client(Target(url, policy="round_robin")) as client:
        await client.model_id()
        renderer = Renderer(TOKENS_PER_WORD)
        await play(client, WORKLOAD, renderer, spec_of(ArrivalSpec(ArrivalKind.CLOSED, concurrency=32), 200, 10**6))
        cpu_s = time.process_time()
        run = await play(client, WORKLOAD, renderer, spec_of(arrivals, requests))
        cpu_s = time.process_time() - cpu_s
    assert run.records.completed.all(), run.records.details
    return _cost(len(run.records), run.duration_s, cpu_s, run.records.lag_s)


async def bare(url: str, arrivals: ArrivalSpec, requests: int) -> Cost:
    """Run the same load on aiohttp's client. It posts requests, decodes events and takes times, but makes no
    records."""
    renderer, lags = Renderer(TOKENS_PER_WORD), []
    clock = time.monotonic

    async def one(http: aiohttp.ClientSession, number: int, intended_s: float) -> None:
        body = orjson.dumps({"messages": renderer.messages(WORKLOAD.session(number), 0, {}), "stream": True})
        lags.append(clock() - intended_s)
        times, decoder = [], SseDecoder()
        async with http.post(f"{url}/v1/chat/completions", data=body) as response:
            async for chunk in response.content.iter_any():
                times.append(clock())
                for data in decoder.feed(chunk):
                    if data != b"[DONE]":
                        orjson.loads(data)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        cpu_s, start_s = time.process_time(), clock()
        async with asyncio.TaskGroup() as tasks:
            for number, offset_s in zip(range(requests), start_times_s(arrivals, 1), strict=False):
                while (wait_s := start_s + offset_s - clock()) > 0:  # noqa: ASYNC110  # timers may fire early
                    await asyncio.sleep(wait_s)
                tasks.create_task(one(http, number, start_s + offset_s))
        cpu_s, seconds = time.process_time() - cpu_s, clock() - start_s
    return _cost(requests, seconds, cpu_s, np.array(lags))


def _cost(requests: int, seconds: float, cpu_s: float, lags_s: np.ndarray) -> Cost:
    p50_s, p99_s = np.quantile(lags_s, (0.5, 0.99))
    return Cost(requests, seconds, cpu_s / requests * 1e6, p50_s * 1e3, p99_s * 1e3)


async def memory(url: str, requests: int) -> str:
    """Return the RSS of this process over a run at full speed."""
    process, done, seen = psutil.Process(), 0, {}

    def count(record: RequestRecord) -> None:
        nonlocal done
        done += 1
        if done in (requests // 4, requests):
            seen[done] = process.memory_info().rss / 2**20

    async with Client(Target(url)) as client:
        await client.model_id()
        arrivals = ArrivalSpec(ArrivalKind.CLOSED, concurrency=64)
        # This cache of texts is so small that it is full long before the first sample; the default cache grows up to
        # 64 MiB.
        renderer = Renderer(TOKENS_PER_WORD, cache_bytes=2**20)
        run = await play(client, WORKLOAD, renderer, spec_of(arrivals, requests), count)
    assert run.records.completed.all(), run.records.details
    (few, early), (many, late) = seen.items()
    growth = (late - early) / (many - few) * 100_000
    return (
        f"{early:.1f} MiB after {few:,}, {late:.1f} MiB after {many:,}: {growth:+.2f} MiB per 100,000 requests"
        f" ({len(run.records) / run.duration_s:.0f} requests/s)"
    )


async def parallel(url: str, workers: int, requests: int) -> ArmRun:
    arrivals = ArrivalSpec(ArrivalKind.CLOSED, concurrency=128)
    return await play_parallel(Target(url), WORKLOAD, TOKENS_PER_WORD, spec_of(arrivals, requests), workers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second offered")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each open-loop run")
    parser.add_argument("--only-memory", action="store_true", help="leave everything else out")
    parser.add_argument("--repeats", type=int, default=2, help="repeats of the open-loop runs, in turn")
    parser.add_argument("--memory-requests", type=int, default=200_000, help="0: leave the memory part out")
    options = parser.parse_args()
    everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    pin(0)
    if not options.only_memory:
        speed(ArrivalSpec(ArrivalKind.POISSON, options.rate), round(options.rate * options.seconds), options.repeats)
    if options.memory_requests:
        with mock_engine(MEMORY_CHUNKS, 0.0, core=1) as url:
            print(f"memory: {uvloop.run(memory(url, options.memory_requests))}", flush=True)
    if options.only_memory:
        return
    if everywhere:
        os.sched_setaffinity(0, everywhere)
    with mock_engine(CHUNKS, 0.0) as url:
        for workers in (1, 2):
            run = uvloop.run(parallel(url, workers, round(options.rate * options.seconds)))
            rate = len(run.records) / run.duration_s
            print(f"--workers {workers}: {rate:.0f} requests/s, closed loop of 128, {len(everywhere)} cores for all")


def speed(arrivals: ArrivalSpec, requests: int, repeats: int) -> None:
    """Measure one process on one core: compared with aiohttp at the given rate, and at full speed."""
    print(f"open loop, {arrivals.rate:g} requests/s, {CHUNKS} chunks {GAP_S * 1000:g} ms apart, one core")
    ratios = []
    with mock_engine(CHUNKS, GAP_S, core=1) as url:
        for _ in range(repeats):
            mine, theirs = uvloop.run(ours(url, arrivals, requests)), uvloop.run(bare(url, arrivals, requests))
            ratios.append(theirs.cpu_us / mine.cpu_us)
            print(f"  warmroute    {mine}\n  bare aiohttp {theirs}", flush=True)
    print(f"  a bare aiohttp client needs {sorted(ratios)[len(ratios) // 2]:.2f} times the CPU")
    with mock_engine(CHUNKS, 0.0, core=1) as url:
        full = uvloop.run(ours(url, replace(arrivals, kind=ArrivalKind.CLOSED, concurrency=64), requests))
    print(f"full speed, {CHUNKS} chunks at once\n  warmroute    {full}", flush=True)


if __name__ == "__main__":
    main()
