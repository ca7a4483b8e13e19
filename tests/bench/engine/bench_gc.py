"""Pauses of the garbage collector under load, with and without `engine/common/collector.py`, in one run.

    python -m tests.bench.engine.bench_gc [--keys 1000000] [--blocks 1000000] [--memory-s 60]

Gateway: 32 connections, prompts of 8 KB, streams of 20 chunks (`bench_gateway`), `--keys` keys in the index. The bench
prints the ratio of the whole answer's p99 to the bare proxy's, in alternating runs, then memory over `--memory-s`
seconds. Engine: 32 concurrent requests through scheduler, cache and step loop, with `--blocks` blocks cached; torch is
loaded. A pause is the CPU time of its thread between the two calls of `gc.callbacks`, so other processes' time on
the core does not count. But they empty the CPU's caches, which makes a pause longer: pauses in which the kernel gave
the core to another process are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import psutil
import uvloop
from aiohttp import web

from engine.backend.profiles import SimProfile
from engine.backend.sim import SimBackend
from engine.cache.prefix_cache import PrefixCache
from engine.common.collector import quiet_collector
from engine.contract.events import Keys
from engine.contract.keys import PrefixKey
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import EngineLoop
from engine.sched.request import KeySpan, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig
from router.registry.index import PrefixIndex
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from router.startup.parts import ADMISSION, INDEX
from router.startup.serving import make_runner
from router.views.types import PodId
from tests.bench.gateway.bench_gateway import MODULE as GATEWAY_MODULE
from tests.bench.gateway.bench_gateway import measure, started, wait_ready

MODULE = "tests.bench.engine.bench_gc"
ARMS = ("without", "with")
PODS = 4
STRIDES = 32
BLOCK_SIZE, PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = 16, 1024, 16, 32


class Pauses:
    """Milliseconds of each collection, by generation. Collections in which another process took the core are kept
    apart."""

    def __init__(self) -> None:
        self.ms: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self.disturbed_ms: list[float] = []
        self._begun_s = 0.0
        self._switches = 0
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._switches = involuntary_switches()
            self._begun_s = time.thread_time()
            return
        ms = 1e3 * (time.thread_time() - self._begun_s)
        if involuntary_switches() > self._switches:
            self.disturbed_ms.append(ms)
        else:
            self.ms[about["generation"]].append(ms)

    def take(self) -> dict[str, Any]:
        """Return the count and the longest of the pauses since the last call, for each generation and for disturbed
        pauses.

        `longest` is the longest pause that was not disturbed.
        """
        found = {str(generation): (len(ms), max(ms, default=0.0)) for generation, ms in self.ms.items()}
        longest = max(longest for _, longest in found.values())
        disturbed = (len(self.disturbed_ms), max(self.disturbed_ms, default=0.0))
        for ms in (*self.ms.values(), self.disturbed_ms):
            ms.clear()
        return {"longest": longest, "disturbed": disturbed, **found}


def involuntary_switches() -> int:
    """Return how often the kernel took the core from this thread although the thread was not waiting."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def shown(pauses: dict[str, Any]) -> str:
    """Return the pauses as one line."""
    parts = [f"{pauses[g][0]} of generation {g} ({pauses[g][1]:.1f} ms)" for g in "012"]
    count, longest = pauses["disturbed"]
    return f"longest pause {pauses['longest']:6.2f} ms; {', '.join(parts)}; {count} disturbed ({longest:.1f} ms)"


@contextlib.asynccontextmanager
async def arm(name: str, is_idle: Any) -> AsyncIterator[None]:
    """Set the collector as the programs do, or as Python does by default."""
    async with contextlib.AsyncExitStack() as stack:
        if name == "with":
            await stack.enter_async_context(quiet_collector(is_idle))
        yield


# -- the gateway ----------------------------------------------------------------------------------------------------


def fill(index: PrefixIndex, keys: int) -> None:
    """Add keys until the index has `keys`, half of them reported and half speculative."""
    rng = random.Random(1)

    def chain() -> Keys:
        return tuple(PrefixKey(rng.getrandbits(64)) for _ in range(STRIDES))

    while len(index) < keys:
        pods = [PodId(f"told-{rng.randrange(PODS)}"), PodId(f"full-{rng.randrange(64)}")]
        index.apply(pods[0], (), (chain(), (), ()))
        index.speculate(pods[1], chain(), 0.0, 1e9)


async def run_gateway(name: str, engines: str, keys: int) -> None:
    """Serve with `keys` keys in the index, half of them reported and half speculative; print the URL."""
    app = build_app(GatewaySettings(engines=engines.split(","), policy="predicted_ttft"))
    pauses = Pauses()

    async def tell(request: web.Request) -> web.Response:
        return web.json_response(pauses.take())

    app.router.add_get("/bench/pauses", tell)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fill(app[INDEX], keys)
    async with arm(name, lambda: not app[ADMISSION].in_flight):
        print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


def asked(url: str) -> dict[str, Any]:
    """Return the gateway's pauses since the last question."""
    with urllib.request.urlopen(f"{url}/bench/pauses", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def compare_gateways(keys: int, repeats: int, count: int, memory_s: float) -> None:
    """Print pauses, p99 and memory."""
    with (
        started(sys.executable, "-m", GATEWAY_MODULE, "engines", str(PODS)) as (engines, _),
        started(sys.executable, "-m", GATEWAY_MODULE, "bare", engines) as (bare_url, _),
        started(sys.executable, "-m", MODULE, "gateway", "without", engines, str(keys)) as (plain_url, _),
        started(sys.executable, "-m", MODULE, "gateway", "with", engines, str(keys)) as (quiet_url, quiet),
    ):
        urls = {"bare": bare_url, "without": plain_url, "with": quiet_url}
        for name in ARMS:
            wait_ready(urls[name], PODS)
        for url in urls.values():
            measure(url, None, 500, 32, "spread")
        for name in ARMS:
            asked(urls[name])
        p99_ms: dict[str, list[float]] = {name: [] for name in urls}
        order = list(itertools.islice(itertools.cycle(itertools.permutations(urls)), repeats))
        for names in order:
            for name in names:
                p99_ms[name].append(measure(urls[name], None, count, 32, "spread")["p99_ms"])
        print(f"gateway, {keys:,} keys, {repeats * count:,} requests an arm:")
        for name in ARMS:
            print(f"  {name:8} {shown(asked(urls[name]))}", flush=True)
        for name in ARMS:
            ratios = [mine / bare for mine, bare in zip(p99_ms[name], p99_ms["bare"], strict=True)]
            print(
                f"  {name:8} p99 {statistics.median(p99_ms[name]):6.1f} ms, bare proxy"
                f" {statistics.median(p99_ms['bare']):6.1f}: {statistics.median(ratios):.2f} times"
                f" ({min(ratios):.2f} to {max(ratios):.2f}, {repeats} runs); best runs {min(p99_ms[name]):.1f} and"
                f" {min(p99_ms['bare']):.1f} ms: {min(p99_ms[name]) / min(p99_ms['bare']):.2f} times (target 1.5)"
            )
        sizes, done, end_s = [], 0, time.monotonic() + memory_s
        while time.monotonic() < end_s:
            measure(quiet_url, None, count, 32, "spread")
            done += count
            sizes.append((done, quiet.memory_info().rss / 2**20))
        print(f"  with     {shown(asked(quiet_url))}")
        show_memory(sizes)


def show_memory(sizes: list[tuple[int, float]]) -> None:
    """Print the growth over the second half of the requests, and its extrapolation to a million."""
    if len(sizes) < 4:
        return
    (first, at_first), (last, at_last) = sizes[len(sizes) // 2 - 1], sizes[-1]
    growth = 1e6 * (at_last - at_first) / (last - first)
    said = ", ".join(f"{mib:.1f}" for _, mib in sizes[:: max(1, len(sizes) // 8)])
    print(
        f"  memory   {at_last:.1f} MiB after {last:,} requests ({said});\n"
        f"           {at_last - at_first:+.2f} MiB over the last {last - first:,}: {growth:+.0f} MiB in a million"
        " if that went on"
    )


# -- the engine -----------------------------------------------------------------------------------------------------


async def run_engine(name: str, blocks: int, seconds: float) -> None:
    """Fill the cache, then run requests; print pauses and memory as JSON."""
    import torch  # noqa: F401  # as in an engine that computes

    profile = SimProfile("bench", w0_ms=0.1, a_ms=0, c1_ms=0, c2_ms=0, c3_ms=0, c4_ms=0, kv_tokens=blocks * BLOCK_SIZE)
    cache = PrefixCache(blocks, BLOCK_SIZE)
    scheduler = Scheduler(cache, SchedulerConfig(max_step_tokens=8192, max_running=AT_ONCE, max_waiting=AT_ONCE))
    loop = EngineLoop(
        scheduler,
        SimBackend(profile, 32_000, 1),
        on_changes=lambda changes: None,
        metrics=EngineMetrics("bench"),
        step_deadline_s=60,
    )
    pauses, rng, ids = Pauses(), random.Random(2), itertools.count()

    def prompt(tokens: int) -> tuple[list[int], tuple[KeySpan, ...]]:
        start = rng.getrandbits(20)
        spans = tuple(KeySpan(PrefixKey(rng.getrandbits(64)), 64 * (i + 1)) for i in range(tokens // 64))
        return list(range(start, start + tokens)), spans

    async with arm(name, lambda: not loop.open_requests):
        at_start = pauses.take()
        for _ in range(-(-blocks // 1024)):
            _fill(cache, str(next(ids)), *prompt(BLOCK_SIZE * 1024))
        filling = pauses.take()
        stepping = asyncio.create_task(loop.run())
        done, sizes, end_s = 0, [], time.monotonic() + seconds

        async def user() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                tokens, spans = prompt(PROMPT_TOKENS)
                request = Request(
                    next(ids),
                    tokens,
                    max_tokens=OUTPUT_TOKENS,
                    sampling=SamplingParams(temperature=0),
                    key_spans=spans,
                    salt=str(rng.randrange(10_000)),
                )
                async with loop.submit([request]) as stream:
                    async for _ in stream:
                        pass
                done += 1
                if done % 500 == 0:
                    sizes.append((done, psutil.Process().memory_info().rss / 2**20))

        await asyncio.gather(*[user() for _ in range(AT_ONCE)])
        stepping.cancel()
        await asyncio.wait([stepping])
        seen = {"start": at_start["longest"], "filling": filling, "load": pauses.take(), "done": done, "sizes": sizes}
        print(json.dumps(seen | {"cached": len(cache.pool.idle_blocks())}))


def _fill(cache: PrefixCache, salt: str, tokens: list[int], spans: tuple[KeySpan, ...]) -> None:
    """Leave the prompt's blocks in the cache."""
    sequence = cache.open(tokens, salt, spans)
    cache.admit(sequence, len(tokens))
    cache.commit(sequence, len(tokens))
    cache.release(sequence)
    cache.take_changes()


def compare_engines(blocks: int, seconds: float) -> None:
    """Print pauses and memory."""
    for name in ARMS:
        command = [sys.executable, "-m", MODULE, "engine", name, str(blocks), str(seconds)]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        print(f"engine, {found['cached']:,} blocks cached, {found['done']:,} requests:")
        if name == "with":
            print(f"  {name:8} freezing at the start, before anything is served: {found['start']:.0f} ms")
        print(f"  {name:8} {shown(found['load'])}")
        print(f"  {name:8} while the cache fills: {shown(found['filling'])}")
        show_memory(found["sizes"])


def main() -> None:
    """Run the comparison, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="in the gateway's index")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the engine's cache")
    parser.add_argument("--repeats", type=int, default=24, help="runs of each arm of the gateway")
    parser.add_argument("--requests", type=int, default=600, help="per run")
    parser.add_argument("--memory-s", type=float, default=60, help="seconds of requests for the gateway's memory")
    parser.add_argument("--engine-s", type=float, default=30, help="seconds of requests for each engine; 0: none")
    roles = parser.add_subparsers(dest="role")
    gateway = roles.add_parser("gateway")
    gateway.add_argument("arm", choices=ARMS)
    gateway.add_argument("engines")
    gateway.add_argument("keys", type=int)
    engine = roles.add_parser("engine")
    engine.add_argument("arm", choices=ARMS)
    engine.add_argument("blocks", type=int)
    engine.add_argument("seconds", type=float)
    args = parser.parse_args()
    if args.role is None:
        if args.engine_s:
            compare_engines(args.blocks, args.engine_s)
        compare_gateways(args.keys, args.repeats, args.requests, args.memory_s)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.role == "gateway":
            runner.run(run_gateway(args.arm, args.engines, args.keys))
        else:
            runner.run(run_engine(args.arm, args.blocks, args.seconds))


if __name__ == "__main__":
    main()
