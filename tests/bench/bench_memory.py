"""Memory of a gateway over a million requests: `python -m tests.bench.bench_memory`.

Scripted engines, the gateway and the clients of `bench_gateway` share one process and one event loop, so what is told
is theirs together; the engines and the clients keep nothing. Prompts have 1 KB: a shared half of one of eight prefixes,
and a half that no other has. The first requests fill what is bounded (the index, buffers, pools); from there on the
memory is to stay as it is. 20 chunks a stream, every eighth request whole.
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

from engine.contract.collector import quiet_collector
from engine.contract.settings import load_or_exit
from router.app import build_app
from router.config import GatewaySettings
from router.parts import ADMISSION, FLEET, INDEX
from router.serving import make_runner
from tests.bench.bench_gateway import Client, Engine, Load, chat

CONNECTIONS = 32
PREFIXES = 8
HALF_BYTES = 512
WHOLE_EVERY = 8
START_S = 60.0
STEP_S = 3600.0
"""For the requests of one line, on a machine with much else to do."""


class Distinct(Load):
    """Requests that are made when they are sent: a million of them would be the memory that is looked for."""

    def __init__(self, count: int, first: int, prompts: int) -> None:
        super().__init__(count, CONNECTIONS, "stream")
        self.number = first
        self.prompts = prompts

    def next_request(self) -> bytes | None:
        if not self.left:
            return None
        self.left -= 1
        self.number += 1
        # What the measurement of latency keeps of each request.
        self.first_byte_s.clear()
        self.total_s.clear()
        shared = f"system prompt number {self.number % PREFIXES} ".ljust(HALF_BYTES, "s")
        own = f"{self.number % self.prompts if self.prompts else self.number} "
        text = shared + own * (HALF_BYTES // len(own))
        kind = "stream" if self.number % WHOLE_EVERY else "json"
        return chat(text, kind)


def resident_mib() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def run(requests: int, step: int, pods: int, prompts: int) -> None:
    """Send them, and print a line for every `step`."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as running:
        urls = []
        for i in range(pods):
            server = await loop.create_server(lambda i=i: Engine(f"pod-{i}"), "127.0.0.1", 0)  # type: ignore[misc]
            running.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        # The engines answer when this process gets a core, however long that takes on a busy machine.
        patient = ("--connect-timeout-s", "60", "--probe-timeout-s", "60")
        settings = load_or_exit(GatewaySettings, ["--engines", ",".join(urls), "--port", "0", *patient], "bench_memory")
        app = build_app(settings)
        runner = make_runner(app)
        await runner.setup()
        running.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with asyncio.timeout(START_S):
            await app[FLEET].wait_probed()
        await running.enter_async_context(quiet_collector(lambda: not app[ADMISSION].in_flight))
        port = runner.addresses[0][1]
        print(f"before: {resident_mib():.1f} MiB", flush=True)
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
                f"{tracked:7,} containers that the collector sees, {tasks} tasks; {cpu_us:.0f} us of CPU each",
                flush=True,
            )
        print(f"most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f} MiB")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--step", type=int, default=100_000, help="requests between two lines")
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=0, help="that differ; 0: all do, and the index fills")
    arguments = parser.parse_args()
    logging.disable()
    uvloop.run(run(arguments.requests, arguments.step, arguments.pods, arguments.prompts))


if __name__ == "__main__":
    main()
