"""How late a gateway hears where another sent a request.

    python -m tests.bench.gateway.bench_peer_sync_late [--seconds 10]

The bench runs real gateways, a process each, with engines that publish nothing and a real Redis. Each gateway decides
for requests that come at random times, as its request path does, but without connections to clients and engines. On a
small machine, those connections would take so much CPU that they would be measured instead. A request's delay is the
time from the decision at one gateway to its effect at another, in the index and in the load of its pod. All processes
share one clock.

Each load has two rows. In the first, gateways tell of each request at once. In the second, they tell of requests in
batches, as of all other news. CPU is that of the gateways, including decisions, probes and the load of their engines.
Peer work on the machine makes everything later, so compare only rows of one session.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence

import redis
from aiohttp import web

from engine.contract.events import Keys
from engine.contract.keys import prefix_keys
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser
from router.choosing.peer_setup import PeerSync
from router.fleet.pod import TrackedRequest
from router.peer_sync import pace
from router.peer_sync.sent_reports import SentReport
from router.reading.inbound import Inbound
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from router.startup.parts import CHOOSER, FLEET, PEER_SYNC, SENT_REPORTS
from router.startup.serving import make_runner
from router.views.types import PodId
from tests.redis_server import running_redis
from tests.router.rig.helpers import ScriptedEngine, eventually

ENGINES = 8
LOADS = ((2, 50.0), (2, 500.0))
"""Gateways, and total requests per second."""
MANY = (10, 2000.0)
PROMPT_BYTES = 6000
BATCHES_PAUSE_S = 0.01
"""Pause after a read in the version in which gateways told everything in batches."""
Pipe = multiprocessing.connection.Connection


def serve_engines(pipe: Pipe) -> None:
    """Answer probes until told to stop."""

    async def run() -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            raise web.HTTPNotFound

        engines = [ScriptedEngine(None, answer) for _ in range(ENGINES)]
        for engine in engines:
            await engine.start()
        pipe.send([engine.url for engine in engines])
        await asyncio.to_thread(pipe.recv)
        for engine in engines:
            await engine.stop()

    asyncio.run(run())


def serve_gateway(pipe: Pipe, number: int, of: int, engines: Sequence[str], redis_url: str, at_once: bool) -> None:
    """Decide at the requested rate, then report when this gateway heard of each request, and the CPU time."""
    if not at_once:
        pace.ROUTED_S = pace.REST_S
        pace.BURST = 1
        pace.READ_S = BATCHES_PAUSE_S

    async def run() -> None:
        settings = GatewaySettings(
            engines=list(engines), redis_url=redis_url, policy="predicted_ttft", engine_metrics_port=0
        )
        app = build_app(settings)
        runner = make_runner(app)
        await runner.setup()
        clock, times_s = asyncio.get_running_loop().time, dict[str, float]()

        def heard(pod_id: PodId, session_id: str, keys: Keys, prompt_tokens: int, at_s: float) -> None:
            times_s[session_id] = clock()

        app[SENT_REPORTS].listen(heard)
        sharing = app[PEER_SYNC]
        assert isinstance(sharing, PeerSync)
        await eventually(lambda: len(app[FLEET].admitted()) == len(engines))
        await eventually(lambda: len(sharing.status().gateways) == of - 1, 60.0)
        pipe.send(None)
        rate, seconds = await asyncio.to_thread(pipe.recv)
        began_cpu_s = time.process_time()
        await decide(app[CHOOSER], random.Random(number), rate, seconds)
        await asyncio.sleep(0.5)
        pipe.send((times_s, time.process_time() - began_cpu_s))
        await asyncio.to_thread(pipe.recv)
        await runner.cleanup()

    asyncio.run(run())


async def decide(chooser: Chooser, rng: random.Random, rate: float, seconds: float) -> None:
    """Decide the requests of one gateway at random times; each takes 0.1 s on its pod."""
    loop = asyncio.get_running_loop()
    heads = [random.Random(head).randbytes(PROMPT_BYTES // 2) for head in range(64)]
    end_s = (next_s := loop.time()) + seconds
    while (next_s := next_s + rng.expovariate(rate)) < end_s:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        inbound = Inbound(
            endpoint=Endpoint.COMPLETIONS,
            model="m",
            stream=True,
            policy="predicted_ttft",
            keys=prefix_keys(rng.choice(heads) + rng.randbytes(PROMPT_BYTES // 2), 0),
            prompt_bytes=PROMPT_BYTES,
            prompt_tokens=PROMPT_BYTES // 4,
            tokens_per_stride=64.0,
            output_tokens=64,
            teaches_tokens=False,
            body=b"",
        )
        choice = chooser.choose(inbound)
        name = f"{rng.getrandbits(128):032x}"
        tracked = TrackedRequest(
            choice.pod,
            name,
            prompt_tokens=inbound.prompt_tokens,
            uncached_tokens=max(0, inbound.prompt_tokens - choice.cached_tokens),
            output_tokens=inbound.output_tokens,
            streams=True,
            clock=loop.time,
        )
        tracked.__enter__()
        told = chooser.report_of(inbound, choice, name)
        assert told is not None
        told.sent()
        loop.call_later(0.02, _began, tracked, told)
        loop.call_later(0.1, _ended, tracked, told)


def _began(tracked: TrackedRequest, told: SentReport) -> None:
    tracked.first_token(None)
    told.began(None)


def _ended(tracked: TrackedRequest, told: SentReport) -> None:
    tracked.__exit__()
    told.ended()


@contextlib.contextmanager
def beside(serve: object, *arguments: object) -> Iterator[Pipe]:
    """Run `serve(pipe, *arguments)` in a process. A message of None ends it after the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments))  # type: ignore[arg-type]
    process.start()
    try:
        yield here
        here.send(None)
        process.join(10.0)
    finally:
        process.kill()
        process.join()


def measure(count: int, rate: float, seconds: float, *, at_once: bool) -> str:
    """Return one row."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_redis())
        engines = stack.enter_context(beside(serve_engines))
        found = engines.recv()
        gateways = [
            stack.enter_context(beside(serve_gateway, number, count, found, server.url, at_once))
            for number in range(count)
        ]
        for gateway in gateways:
            gateway.recv()
        with redis.Redis.from_url(server.url) as client:
            commands, began_s = client.info("stats")["total_commands_processed"], time.monotonic()
            cpu_s = _cpu_s(client)
            for gateway in gateways:
                gateway.send((rate / count, seconds))
            told = [gateway.recv() for gateway in gateways]
            took_s = time.monotonic() - began_s
            commands = (client.info("stats")["total_commands_processed"] - commands) / took_s
            redis_share = (_cpu_s(client) - cpu_s) / took_s
    heard_s = [times_s for times_s, _ in told]
    decided_s = {request: min(times[request] for times in heard_s if request in times) for request in heard_s[0]}
    late_ms = sorted(1e3 * (times[r] - decided_s[r]) for times in heard_s for r in times if r in decided_s)
    late_ms = late_ms[len(decided_s) :]  # leave out the delays at the deciding gateways, which are 0
    cpu_us = 1e6 * sum(cpu_s for _, cpu_s in told) / len(decided_s)
    p10, p50, p90, p99 = (late_ms[len(late_ms) * percent // 100] for percent in (10, 50, 90, 99))
    return (
        f"{count:2} gateways, {'at once' if at_once else 'in batches':10}, {len(decided_s) / seconds:5.0f} requests/s:"
        f" median {p50:5.1f}, p90 {p90:5.1f}, p99 {p99:5.1f}, p10 {p10:4.1f} ms late;"
        f" {cpu_us:4.0f} us of CPU a request, {commands:5.0f} commands/s, Redis {100 * redis_share:4.1f} % of a core"
    )


def _cpu_s(client: redis.Redis) -> float:
    used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def main() -> None:
    """Print a row for each load, at once and in batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each run, s (10)")
    parser.add_argument("--many", action="store_true", help="ten gateways at 2,000 requests/s too; takes four cores")
    options = parser.parse_args()
    print(f"load of the machine, 1 minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    for count, rate in (*LOADS, *([MANY] if options.many else [])):
        for at_once in (True, False):
            print(measure(count, rate, options.seconds, at_once=at_once), flush=True)


if __name__ == "__main__":
    main()
