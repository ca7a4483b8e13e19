"""Minutes of load on real processes, while engines and Redis are killed, stopped and restarted, and gateways rolled.

    python -m tests.bench.fleet.soak [--seconds 300] [--rate 100] [--engines 4] [--seed 1]

The soak checks three promises, and the exit status is 1 if one is broken. A request whose answer has not begun is never
lost. No request hangs. Nothing is left behind: every count of requests in flight is 0 at the end, and memory is flat
over the second half. Streams that end in an error event after their first byte are counted and shown too. The soak
needs two cores with little other work: on busy cores engines answer too late, and requests are lost for that reason.

It runs two gateways, emulated engines on fixed ports, and a Redis server. One process is disturbed at a time, so there
is always an engine that serves and a gateway to send to, as with rolling updates and disruption budgets. Gateways are
rolled as by Kubernetes: one gets SIGTERM, clients use it for a moment longer, and after its end a new process starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import psutil

from engine.common.sse import SseDecoder
from engine.model.checkpoint import make_checkpoint
from tests.e2e.programs import Program
from tests.redis_server import RedisServer, running_redis

MODEL = "tiny"
HUNG_S = 60.0
"""A request that has not ended by then counts as hanging."""
DISTURB_EVERY_S = 4.0
STOPPED_S = (1.0, 8.0)
DOWN_S = (0.5, 3.0)
NOTICE_S = 0.5
"""Seconds after SIGTERM for which clients still use a gateway, because endpoints are updated with a delay."""
SETTLE_S = 20.0
"""Seconds for the last answers, and for the counts to return to 0."""
FLAT_SHARE, FLAT_MIB = 0.1, 24.0
"""In the second half, a process may grow by this share or by so many MiB, whichever is more: allocators and caches fill
slowly."""
IN_FLIGHT = ("warmroute_gateway_in_flight", "warmroute_gateway_body_bytes", "warmroute_gateway_answer_bytes")
ENGINE_IN_FLIGHT = "warmroute_gateway_engine_in_flight"
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")


GATEWAY = "tests.router.rig.gateway_program"


class Service:
    """A program that restarts at the same address."""

    def __init__(self, module: str, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.module = module
        self.flags = [*flags, "--port", str(self.port)]
        self.program: Program | None = None
        self.is_offered = False
        """Whether clients send requests to it."""

    @property
    def pid(self) -> int:
        assert self.program is not None
        return self.program.process.pid

    @property
    def metrics(self) -> str:
        """Return the URL of its metrics."""
        assert self.program is not None
        return f"{self.program.admin if self.module == GATEWAY else self.url}/metrics"

    async def start(self) -> None:
        self.program = Program(self.module, *self.flags)
        await asyncio.to_thread(self.program.wait_ready)
        self.is_offered = True

    async def stop(self, sig: int = signal.SIGTERM) -> int:
        """Stop the program; return its exit status."""
        self.is_offered = False
        assert self.program is not None
        return await asyncio.to_thread(self.program.stop, sig, HUNG_S)


@dataclass(slots=True)
class Counts:
    """Counts of the requests' outcomes."""

    ends: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Outcomes of lost requests whose answer had not begun."""
    first_s: list[float] = field(default_factory=list)


class Load:
    """Requests at a fixed rate, sent whether or not earlier ones have been answered."""

    def __init__(self, gateways: list[Service], rate: float, rng: random.Random) -> None:
        self._gateways = gateways
        self._rate = rate
        self._rng = rng
        self._calls: set[asyncio.Task[None]] = set()
        self.counts = Counts()

    async def run(self, seconds: float) -> None:
        """Send requests; return when the last one has ended, or hangs."""
        loop = asyncio.get_running_loop()
        start_s, number = loop.time(), 0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            while (at_s := number / self._rate) < seconds:
                await asyncio.sleep(max(0.0, start_s + at_s - loop.time()))
                self._calls.add(call := asyncio.create_task(self._ask(http, number)))
                call.add_done_callback(self._calls.discard)
                number += 1
            if self._calls:
                await asyncio.wait(self._calls)

    async def _ask(self, http: aiohttp.ClientSession, number: int) -> None:
        gateway = self._rng.choice([gateway for gateway in self._gateways if gateway.is_offered])
        tokens = self._rng.randint(4, 40)
        prompt = f"Shared beginning {self._rng.randrange(8)}. " * 40 + f"Question {number}?"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        sent_s, has_begun, end = time.monotonic(), False, "lost"
        try:
            async with asyncio.timeout(HUNG_S), http.post(f"{gateway.url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    self.counts.lost.append(f"{answer.status}: {(await answer.text())[:200]}")
                    return
                decoder, events = SseDecoder(), list[bytes]()
                async for chunk in answer.content.iter_any():
                    if not has_begun:
                        self.counts.first_s.append(time.monotonic() - sent_s)
                    has_begun = True
                    events += decoder.feed(chunk)
                end = ended(events, tokens)
        except TimeoutError:
            end = "hung"
        except (aiohttp.ClientError, OSError) as error:
            end = "broken" if has_begun else "lost"
            if not has_begun:
                self.counts.lost.append(f"{type(error).__name__}: {error}")
        finally:
            self.counts.ends[end] += 1


def ended(events: list[bytes], tokens: int) -> str:
    """Return how a stream with these events ended."""
    if not events or events[-1] != b"[DONE]" or any(b'"error"' in event[:10] for event in events):
        return "broken"
    usage = orjson.loads(events[-2])["usage"]
    return "whole" if usage["completion_tokens"] == tokens else "wrong number of tokens"


class Trouble:
    """Disturbs one process after another."""

    def __init__(self, engines: list[Service], gateways: list[Service], redis: RedisServer, rng: random.Random) -> None:
        self._engines = engines
        self._gateways = gateways
        self._redis = redis
        self._rng = rng
        self.done: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Disturb for `seconds`; gateways are rolled only in the first half, so that the second shows the memory."""
        loop = asyncio.get_running_loop()
        end_s, half_s = loop.time() + seconds, loop.time() + seconds / 2
        kinds: list[Callable[[], Awaitable[None]]] = [self._kill, self._stall, self._redis_restart, self._restart]
        turn = 0
        while loop.time() + DISTURB_EVERY_S < end_s:
            await asyncio.sleep(DISTURB_EVERY_S)
            choices = [self._roll, *kinds] if loop.time() < half_s else kinds
            await choices[turn % len(choices)]()
            turn += 1

    async def _kill(self) -> None:
        engine = self._rng.choice(self._engines)
        await engine.stop(signal.SIGKILL)
        await asyncio.sleep(self._rng.uniform(*DOWN_S))
        await engine.start()
        self.done["engines killed"] += 1

    async def _restart(self) -> None:
        engine = self._rng.choice(self._engines)
        self.exits[f"engine {await engine.stop()}"] += 1
        await engine.start()
        self.done["engines restarted"] += 1

    async def _stall(self) -> None:
        pid = self._rng.choice(self._engines).pid
        psutil.Process(pid).suspend()
        try:
            await asyncio.sleep(self._rng.uniform(*STOPPED_S))
        finally:
            psutil.Process(pid).resume()
        self.done["engines stopped for seconds"] += 1

    async def _redis_restart(self) -> None:
        self._redis.stop()
        await asyncio.sleep(self._rng.uniform(*DOWN_S))
        await asyncio.to_thread(self._redis.start)
        self.done["Redis restarted"] += 1

    async def _roll(self) -> None:
        for gateway in self._gateways:
            assert gateway.program is not None
            gateway.program.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(NOTICE_S)
            gateway.is_offered = False
            await asyncio.to_thread(gateway.program.process.wait, HUNG_S)
            self.exits[f"gateway {await gateway.stop()}"] += 1
            await gateway.start()
        self.done["gateways rolled, all of them"] += 1


class Memory:
    """Resident MiB of processes over time."""

    def __init__(self, services: list[Service]) -> None:
        self._services = services
        self._seen: dict[tuple[str, int], list[float]] = {}

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            for service in self._services:
                with contextlib.suppress(psutil.Error):
                    mib = psutil.Process(service.pid).memory_info().rss / 2**20
                    self._seen.setdefault((service.module, service.pid), []).append(mib)
            await asyncio.sleep(0.5)

    def forget(self) -> None:
        """Discard the samples so far."""
        self._seen.clear()

    def growth(self) -> list[tuple[str, float, float]]:
        """Return program, and MiB in the first and last quarter of the samples, for processes that lived throughout."""
        most = max(map(len, self._seen.values()), default=0)
        out = []
        for (module, _), mib in self._seen.items():
            if len(mib) >= 0.95 * most and (quarter := len(mib) // 4):
                out.append((module, statistics.median(mib[:quarter]), statistics.median(mib[-quarter:])))
        return out


async def left_over(gateways: list[Service], engines: list[Service]) -> list[str]:
    """Return the counts that do not return to 0."""
    found: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while True:
                found = await in_flight(gateways, engines)
                if not found:
                    break
                await asyncio.sleep(0.2)
    return found


async def in_flight(gateways: list[Service], engines: list[Service]) -> list[str]:
    """Return the counts that are not 0."""
    found = []
    async with aiohttp.ClientSession() as http:
        for service in (*gateways, *engines):
            async with http.get(service.metrics, raise_for_status=True) as answer:
                for line in (await answer.text()).splitlines():
                    name, _, value = line.rpartition(" ")
                    if name.partition("{")[0] in (*IN_FLIGHT, ENGINE_IN_FLIGHT, *RUNNING) and float(value):
                        found.append(f"{service.module} {line}")
    return found


async def breaks(gateways: list[Service]) -> Counter[str]:
    """Count the streams that engines broke, by what followed, as counted by gateways that are alive at the end."""
    found: Counter[str] = Counter()
    async with aiohttp.ClientSession() as http:
        for gateway in gateways:
            async with http.get(gateway.metrics, raise_for_status=True) as answer:
                for line in (await answer.text()).splitlines():
                    if line.startswith("warmroute_gateway_broken_attempts_total{") and float(line.split()[-1]):
                        found[line.split('"')[1]] += round(float(line.split()[-1]))
    return found


@contextlib.asynccontextmanager
async def started(engines: int, redis: RedisServer, folder: Path) -> AsyncIterator[tuple[list[Service], list[Service]]]:
    """Start engines and two gateways; yield them when all are ready."""
    flags = ["--model", str(folder), "--served-model-name", MODEL, "--device", "sim", "--redis-url", redis.url]
    pods = [Service("engine", *flags, "--pod-id", f"pod-{i}") for i in range(engines)]
    urls = ",".join(pod.url for pod in pods)
    limits = ["--first-byte-timeout-s", "5", "--idle-timeout-s", "5"]
    limits += ["--drain-delay-s", "1.5"]
    gateways = [
        Service(
            GATEWAY,
            '{"probe_interval_s": 0.5, "lease_s": 5.0}',
            "--engines",
            urls,
            "--redis-url",
            redis.url,
            "--admin-port",
            "0",
            *limits,
        )
        for _ in range(2)
    ]
    try:
        await asyncio.gather(*(pod.start() for pod in pods))
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        yield pods, gateways
    finally:
        for service in (*gateways, *pods):
            if service.program is not None:
                service.program.stop(signal.SIGKILL)


async def soak(seconds: float, rate: float, engines: int, seed: int) -> int:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch, running_redis() as redis:
        folder = Path(scratch) / MODEL
        make_checkpoint(folder, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128)
        async with started(engines, redis, folder) as (pods, gateways):
            load, memory = Load(gateways, rate, rng), Memory([*gateways, *pods])
            trouble = Trouble(pods, gateways, redis, random.Random(seed + 1))
            watch = asyncio.create_task(memory.watch())
            asyncio.get_running_loop().call_later(seconds / 2, memory.forget)
            await asyncio.gather(load.run(seconds), trouble.run(seconds))
            watch.cancel()
            left = await left_over(gateways, pods)
            return show(load.counts, trouble, memory.growth(), left, await breaks(gateways))


def show(
    counts: Counts, trouble: Trouble, growth: list[tuple[str, float, float]], left: list[str], broken: Counter[str]
) -> int:
    """Print the table; return the exit status."""
    total = sum(counts.ends.values())
    print(f"\n{total} requests")
    for end, count in counts.ends.most_common():
        print(f"  {end:32} {count:7}  {count / total:8.3%}")
    for text, count in Counter(counts.lost).most_common(5):
        print(f"    {count} x {text}")
    if len(counts.first_s) > 1:
        cuts = statistics.quantiles(counts.first_s, n=100)
        print(
            f"  first byte: p50 {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms, most {max(counts.first_s):.1f} s"
        )
    for name, count in (trouble.done + trouble.exits).items():
        print(f"  {name:32} {count:7}")
    for name, count in broken.items():
        print(f"  {'streams broken: ' + name:32} {count:7}")
    faults = [f"{name}: {count}" for name, count in counts.ends.items() if name not in ("whole", "broken")]
    faults += [f"not 0 at the end: {line}" for line in left]
    faults += [f"exit status: {name}" for name in trouble.exits if not name.endswith(" 0")]
    for module, before, after in growth:
        is_flat = after - before <= max(FLAT_MIB, FLAT_SHARE * before)
        print(f"  {module + ', resident MiB':32} {before:7.1f} to {after:.1f}")
        faults += [] if is_flat else [f"{module} grew from {before:.1f} to {after:.1f} MiB"]
    print("\n".join(["FAILED", *faults]) if faults else "all kept")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--engines", type=int, default=4, help="emulated engines, at least 2")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests, and of what is disturbed when")
    given = parser.parse_args()
    return asyncio.run(soak(given.seconds, given.rate, given.engines, given.seed))


if __name__ == "__main__":
    sys.exit(main())
