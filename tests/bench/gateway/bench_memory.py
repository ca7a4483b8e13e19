"""Memory of a gateway over very many requests.

    python -m tests.bench.gateway.bench_memory --requests 1000000 --keys 1000000

Scripted engines, the gateway and the clients of `bench_gateway` share one process and one event loop, so the figure is
their total; the engines and the clients keep nothing. Prompts have 1 KB: one half is one of eight shared prefixes, the
other half is unique. The first requests fill everything bounded (the index, buffers, pools); from then on the memory
must not grow. A stream has 20 chunks, and every eighth answer comes whole. `--keys` are in the index before the first
request. A pause of the garbage collector is CPU time of the thread (`bench_gc` says when a pause is disturbed). The
collector scans the objects of the engines and the clients too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import time
from pathlib import Path

import uvloop
from aiohttp import web

from engine.common.collector import quiet_collector
from router.settings.constants import Constants
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from router.startup.parts import ADMISSION, FLEET, INDEX
from router.startup.serving import make_runner
from tests.bench.engine.bench_gc import Pauses, fill, shown
from tests.bench.gateway.bench_gateway import Client, Engine, Load, chat

CONNECTIONS = 32
PREFIXES = 8
HALF_BYTES = 512
WHOLE_EVERY = 8
START_S = 60.0
STEP_S = 3600.0
"""Limit for the requests of one line, on a busy machine."""


class Distinct(Load):
    """Requests that are made when they are sent, because a million of them would use the memory that is measured."""

    def __init__(self, count: int, first: int, prompts: int) -> None:
        super().__init__(count, CONNECTIONS, "stream")
        self.number = first
        self.prompts = prompts

    def next_request(self) -> bytes | None:
        if not self.left:
            return None
        self.left -= 1
        self.number += 1
        # The measurement of latency would keep these times for each request.
        self.first_byte_s.clear()
        self.total_s.clear()
        shared = f"system prompt number {self.number % PREFIXES} ".ljust(HALF_BYTES, "s")
        own = f"{self.number % self.prompts if self.prompts else self.number} "
        text = shared + own * (HALF_BYTES // len(own))
        kind = "stream" if self.number % WHOLE_EVERY else "json"
        return chat(text, kind)


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def run(requests: int, step: int, pods: int, prompts: int, index_keys: int) -> None:
    """Send the requests, and print a line for every `step`."""
    pauses = Pauses()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as running:
        urls = []
        for i in range(pods):
            server = await loop.create_server(lambda i=i: Engine(f"pod-{i}"), "127.0.0.1", 0)  # type: ignore[misc]
            running.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        # The engines answer when this process gets a core, which may take long on a busy machine.
        patient = Constants(connect_timeout_s=60.0, probe_timeout_s=60.0)
        app = build_app(GatewaySettings(engines=urls, port=0), patient)
        runner = make_runner(app)
        await runner.setup()
        running.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with asyncio.timeout(START_S):
            await app[FLEET].wait_probed()
        fill(app[INDEX], index_keys)
        await running.enter_async_context(quiet_collector(lambda: not app[ADMISSION].in_flight))
        port = runner.addresses[0][1]
        print(f"before: {resident_mib():.1f} MiB, {len(app[INDEX]):,} keys", flush=True)
        pauses.take()
        for first in range(0, requests, step):
            began_s = time.process_time()
            load_size = min(step, requests - first)
            load = Distinct(load_size, first, prompts)
            for _ in range(CONNECTIONS):
                await loop.create_connection(lambda load=load: Client(load), "127.0.0.1", port)  # type: ignore[misc]
            async with asyncio.timeout(STEP_S):
                await load.done.wait()
            assert load.error is None, load.error
            cpu_us = 1e6 * (time.process_time() - began_s) / load_size
            keys = app[INDEX].statistics().speculative
            tracked, tasks = len(gc.get_objects()), len(asyncio.all_tasks())
            print(
                f"{first + load_size:9,} requests: {resident_mib():6.1f} MiB, {keys:7,} keys believed, "
                f"{tracked:7,} containers that the collector sees, {tasks} tasks; {cpu_us:.0f} us of CPU each; "
                f"{shown(pauses.take())}",
                flush=True,
            )
        print(f"most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f} MiB")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--step", type=int, default=50_000, help="requests between two lines")
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument(
        "--prompts", type=int, default=0, help="number of different prompts; 0: all differ, and the index fills"
    )
    parser.add_argument(
        "--keys", type=int, default=0, help="keys in the index beforehand, of pods that get no requests"
    )
    given = parser.parse_args()
    logging.disable()
    uvloop.run(run(given.requests, given.step, given.pods, given.prompts, given.keys))


if __name__ == "__main__":
    main()
