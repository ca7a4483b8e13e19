"""What is served in time when more requests come than the gateway's own core can pass on.

    python -m tests.bench.gateway.bench_crowd --seconds 8

Engines answer at once, in one process, so the gateway is what is short: a prompt of 96 KB costs it more than a client.
The clients of this process first find the capacity, in a closed loop. Then requests come at even intervals at multiples
of it, each on a connection that is free or new, as from a pool. A request is served in time if it is answered 200
within two seconds. Each client gives up after ten. The share is of the requests a second that the closed loop reached.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter

import orjson
import psutil
import uvloop

from tests.bench.gateway.bench_gateway import started, wait_ready

IN_TIME_S = 2.0
PATIENCE_S = 10.0
CONNECTIONS = 64
BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a question. " * 8000 + "kind=json"}]})
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class Pool:
    """Connections of clients, as many as are needed at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self) -> bytes:
        """Return the status of an answer; `closed` if there is none, `late` after PATIENCE_S."""
        writer = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = (
                    self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
                )
                writer.write(REQUEST)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            if b"connection: close" in head:
                writer.close()
            else:
                self._free.append((reader, writer))
            return head.split(b" ", 2)[1]
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            if writer is not None:
                writer.transport.abort()
            return b"late" if isinstance(error, TimeoutError) else b"closed"


async def capacity(port: int, seconds: float) -> float:
    """Return the requests a second of CONNECTIONS clients in a closed loop."""
    pool, until_s, done = Pool(port), time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < until_s:
            is_good = await pool.ask() == b"200"
            done += is_good

    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return done / seconds


async def offered(port: int, rate: float, seconds: float) -> tuple[float, Counter[bytes]]:
    """Return the requests a second that were served in time, and the answers by status."""
    pool, statuses, good = Pool(port), Counter[bytes](), 0

    async def one() -> None:
        nonlocal good
        began_s = time.perf_counter()
        status = await pool.ask()
        statuses[status] += 1
        good += status == b"200" and time.perf_counter() - began_s <= IN_TIME_S

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(began_s + number / rate - time.perf_counter())
            clients.create_task(one())
    return good / seconds, statuses


async def measure(port: int, process: psutil.Process, seconds: float) -> None:
    """Print a line for each load."""
    await capacity(port, 1.0)
    most = await capacity(port, seconds)
    print(f"capacity: {most:.0f} requests/s in a closed loop of {CONNECTIONS}", flush=True)
    for load in (0.8, 1.0, 2.0, 4.0):
        spent = process.cpu_times()
        rate, statuses = await offered(port, load * most, seconds)
        now = process.cpu_times()
        busy = (now.user + now.system - spent.user - spent.system) / seconds
        shown = ", ".join(f"{status.decode()}: {count}" for status, count in sorted(statuses.items()))
        print(
            f"offered {load:g}: in time {rate / most:.2f} of capacity; gateway's core {busy:.0%}; {shown}", flush=True
        )
        await asyncio.sleep(2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    given = parser.parse_args()
    with started(sys.executable, "-m", "tests.bench.gateway.bench_gateway", "engines", "4") as (engines, _):
        command = (sys.executable, "-m", "router", "--port", "0", "--host", "127.0.0.1", "--engines", engines)
        with started(*command) as (url, process):
            wait_ready(url, 4)
            uvloop.run(measure(int(url.rpartition(":")[2]), process, given.seconds))


if __name__ == "__main__":
    main()
