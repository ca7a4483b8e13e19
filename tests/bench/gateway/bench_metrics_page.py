"""CPU microseconds in which a gateway reads an engine's metrics: `python -m tests.bench.gateway.bench_metrics_page`.

`find`: find the lines in a page. `read`: get a page over a real socket and find them. The bench takes about a minute.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing import Process, Queue

import aiohttp
from aiohttp import web

from router.fleet.fetch import HttpFetch
from router.fleet.metrics_page import read_page
from router.fleet.scrape import MAX_PAGE_BYTES
from tests.router.fleet.pages import Load, sglang_page, vllm_page

READS = 400
DEADLINE_S = 60.0
"""The machine may be busy with other work."""
HOSTILE = (b"vllm:num_requests_running 1\n" * (MAX_PAGE_BYTES // 28))[:MAX_PAGE_BYTES]
PAGES = {
    "vLLM, whole": vllm_page([Load(3.0, 1.0, 0.5)], phases=70),
    "vLLM, the lines that change": vllm_page([Load(3.0, 1.0, 0.5)], phases=0),
    "vLLM, 8 ranks": vllm_page([Load(3.0, 1.0, 0.5)] * 8, phases=70),
    "SGLang": sglang_page([Load(3.0, 1.0, 0.5)]),
}


def serve(port: Queue[int], page: bytes) -> None:
    """Serve one page until the process is ended."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=page)

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/metrics", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def read_us(port: int, count: int) -> float:
    """Return the microseconds that fetching and reading the page once takes."""
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        fetch = HttpFetch(session)
        await fetch(url, f"{url}/metrics", DEADLINE_S, MAX_PAGE_BYTES)
        began_s = time.process_time()
        for _ in range(count):
            read_page(await fetch(url, f"{url}/metrics", DEADLINE_S, MAX_PAGE_BYTES))
        return (time.process_time() - began_s) / count * 1e6


def find_us(page: bytes, count: int) -> float:
    """Return the microseconds that reading the page once takes, without fetching it."""
    began_s = time.process_time()
    for _ in range(count):
        read_page(page)
    return (time.process_time() - began_s) / count * 1e6


def main() -> None:
    """Print a line for each page."""
    for name, page in PAGES.items():
        port: Queue[int] = Queue()
        server = Process(target=serve, args=(port, page), daemon=True)
        server.start()
        try:
            reading_us = asyncio.run(read_us(port.get(timeout=DEADLINE_S), READS))
        finally:
            server.kill()
            server.join()
        print(f"{name:30} {len(page):9,} bytes  find {find_us(page, READS):7.0f} us  read {reading_us:7.0f} us")
    print(f"{'made to be slow':30} {len(HOSTILE):9,} bytes  find {find_us(HOSTILE, 5):7.0f} us")


if __name__ == "__main__":
    main()
