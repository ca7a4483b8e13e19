"""The cost of following a large fleet for a gateway and Redis.

    python -m tests.bench.gateway.bench_registry_fleet --help

The bench has a real Redis server. Simulated engines send the commands that `engine.loop.publish` sends, each over its
own connection. One process has a gateway's real fleet, reader and index; another has only the reads of further
gateways. `core` is CPU seconds per second of the measurement, so a busy machine changes it little.

    idle     every engine publishes heartbeats and nothing else
    served   `--requests` per second over all engines; each changes its engine's load three times, and 32 of its keys
    flat     every engine always has news, so it publishes as many batches as it may

With `--told 0`, the engines publish as in a small fleet, whatever the size of this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import multiprocessing
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import hiredis
import redis
from aiohttp import web

from engine.contract import headers
from engine.contract.events import Keys, MessageKind, RegistryMessage, encode
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from engine.contract.periods import SMALL_FLEET, Periods, periods
from engine.contract.redis_keys import STREAM_DATA_FIELD, STREAM_POD_FIELD, resync_key, snapshot_key, stream_key
from router.fleet.discovery import StaticDiscovery
from router.fleet.fleet import Fleet
from router.fleet.probe import HttpProbe, PodIdentity, ServedModel
from router.registry.index import PrefixIndex
from router.registry.reader import PAUSE_S, RegistryReader
from router.registry.stream_reader import POLL_MS
from router.registry.wire import READ_ENTRIES
from router.views.types import PodId
from tests.redis_server import running_redis

MODEL = "llama"
STRIDE = 256
LEASE_MS = 15_000
KEYS_A_REQUEST = 32
"""A prompt of 8 KB. Each request evicts as many keys as it adds."""
EVENTS_A_REQUEST = 3
"""Begun, prefilled, ended."""


def packed(command: tuple[str | bytes, ...]) -> bytes:
    """Return a command in the form that is sent to Redis."""
    pack: Any = hiredis.pack_command  # the function's type stub accepts only one word
    return bytes(pack(command))


@dataclass(frozen=True)
class Scene:
    """One measurement."""

    pods: int
    mode: str
    requests: float
    told: int
    keys: int
    gateways: int
    seconds: float
    probes: str
    """Port of the server that answers probes, `wanted` until it has started; empty: probes cost nothing."""


# -- engines ---------------------------------------------------------------------------------------------------------


VARIANTS = 4
SEQ_AT = struct.calcsize("<BBHIQ")
"""Offset of `seq` in a message."""


class SimulatedEngine:
    """One engine's connection and its messages, without the engine.

    A few messages are made beforehand. When one is sent, only its `seq` is new. Each message removes what the one
    before it stored.
    """

    def __init__(self, address: str, number: int, scene: Scene, keys_a_message: int) -> None:
        self._pod = f"pod-{number}"
        self._seq = 0
        rng = random.Random(number)
        self._held = tuple(PrefixKey(rng.getrandbits(64)) for _ in range(scene.keys))
        groups = [tuple(PrefixKey(rng.getrandbits(64)) for _ in range(keys_a_message)) for _ in range(VARIANTS)]
        is_busy = scene.mode != "idle"
        self._commands = [
            self._delta(scene, rng.randrange(1, 9) if is_busy else 0, groups[i - 1], groups[i]) for i in range(VARIANTS)
        ]
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._socket.setblocking(True)
        self.snapshot_at_s = self.renewed_at_s = 0.0

    def close(self) -> None:
        self._socket.close()

    def snapshot(self) -> bytes:
        message = RegistryMessage(MessageKind.SNAPSHOT, STRIDE, 7, self._seq, _load(0), (), (self._held, (), ()))
        return packed(("SET", snapshot_key(MODEL, self._pod), encode(message), "PX", str(LEASE_MS)))

    def _delta(self, scene: Scene, running: int, gone: Keys, new: Keys) -> tuple[bytearray, bytearray, int]:
        pace = periods(scene.told)
        data = encode(RegistryMessage(MessageKind.DELTA, STRIDE, 7, 0, _load(running), gone, (new, (), ())))
        entry = (STREAM_POD_FIELD, self._pod.encode(), STREAM_DATA_FIELD, data)
        added = packed(("XADD", stream_key(MODEL), "MAXLEN", "~", str(pace.stream_entries), "*", *entry))
        leased = packed(("PEXPIRE", snapshot_key(MODEL, self._pod), str(LEASE_MS)))
        asked = packed(("GETDEL", resync_key(MODEL, self._pod)))
        return bytearray(added), bytearray(added + leased + asked), added.index(data) + SEQ_AT

    def delta(self, *, renews: bool) -> bytes:
        self._seq += 1
        alone, renewing, seq_at = self._commands[self._seq % VARIANTS]
        command = renewing if renews else alone
        struct.pack_into("<Q", command, seq_at, self._seq)
        return bytes(command)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(65536, socket.MSG_DONTWAIT)
        self._socket.sendall(data)


def _load(running: int) -> LoadReport:
    cost = StepCost(6e-3, 4e-5, 1e-10, 2e-8, 1e-4)
    return LoadReport(running, 0, 1000 * running, running, 2000 * running, 50_000 - 100 * running, 60_000, 16, cost)


def engines(pipe: Connection, address: str, scene: Scene) -> None:
    """Run all engines in this process."""
    pace = periods(scene.told)
    pause_s = _pause_s(scene, pace)
    rate = scene.requests / scene.pods if scene.mode != "idle" else 0.0
    keys = round(rate * pause_s * KEYS_A_REQUEST)
    all_engines = [SimulatedEngine(address, number, scene, keys) for number in range(scene.pods)]
    for engine in all_engines:
        engine.send(engine.snapshot())
    pipe.send("ready")
    pipe.recv()
    rng = random.Random(5)
    now_s = time.monotonic()
    due = [(now_s + rng.uniform(0, pause_s), number) for number in range(scene.pods)]
    for engine in all_engines:
        engine.snapshot_at_s = now_s - rng.uniform(0, pace.snapshot_s)
    heapq.heapify(due)
    while not pipe.poll():
        now_s = time.monotonic()
        for _ in range(500):
            due_s, number = due[0]
            if due_s > now_s:
                break
            heapq.heapreplace(due, (max(due_s + rng.uniform(0.8, 1.2) * pause_s, now_s - 1.0), number))
            engine = all_engines[number]
            renews = now_s - engine.renewed_at_s >= pace.renewal_s
            if renews:
                engine.renewed_at_s = now_s
            data = engine.delta(renews=renews)
            if now_s - engine.snapshot_at_s > pace.snapshot_s:
                engine.snapshot_at_s = now_s
                data += engine.snapshot()
            engine.send(data)
        time.sleep(max(0.0, min(0.01, due[0][0] - time.monotonic())))
    pipe.recv()
    for engine in all_engines:
        engine.close()
    pipe.send("ended")


def _pause_s(scene: Scene, pace: Periods) -> float:
    """Return the mean seconds between two messages of an engine."""
    if scene.mode == "idle":
        return pace.heartbeat_s
    if scene.mode == "flat":
        return pace.batch_s
    return max(pace.batch_s, 1 / (1 / pace.heartbeat_s + EVENTS_A_REQUEST * scene.requests / scene.pods))


def answerers(pipe: Connection, address: str, scene: Scene) -> None:
    """Answer the probes of all engines in this process; the address tells which engine is probed."""
    asyncio.run(_answerers(pipe))


async def _answerers(pipe: Connection) -> None:
    card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench"}

    async def models(request: web.Request) -> web.Response:
        high, low = map(int, request.host.partition(":")[0].split(".")[2:])
        names = {headers.POD: f"pod-{250 * high + low - 1}", headers.EPOCH: "7"}
        return web.json_response({"object": "list", "data": [card]}, headers=names)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    pipe.send(str(runner.addresses[0][1]))
    await asyncio.to_thread(pipe.recv)
    await runner.cleanup()


# -- gateways --------------------------------------------------------------------------------------------------------


def gateway(pipe: Connection, address: str, scene: Scene) -> None:
    """Run the measured gateway in this process."""
    asyncio.run(_gateway(pipe, address, scene))


async def _gateway(pipe: Connection, address: str, scene: Scene) -> None:
    class Known:
        """A probe that costs nothing."""

        async def identify(self, url: str) -> PodIdentity:
            return PodIdentity(PodId(url.removeprefix("http://")), 7, (ServedModel(MODEL, b"{}"),))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)) as session:
        if scene.probes:
            urls = [f"http://127.1.{number // 250}.{number % 250 + 1}:{scene.probes}" for number in range(scene.pods)]
            fleet = Fleet(StaticDiscovery(urls), HttpProbe(session, 5.0), interval_s=2.0, eject_after=3)
        else:
            urls = [f"http://pod-{number}" for number in range(scene.pods)]
            fleet = Fleet(StaticDiscovery(urls), Known(), interval_s=1e6, eject_after=3)
        await _follow(pipe, address, fleet)


async def _follow(pipe: Connection, address: str, fleet: Fleet) -> None:
    index = PrefixIndex()
    reader = RegistryReader(
        f"unix://{address}", index, fleet.report, stride=STRIDE, lease_s=LEASE_MS / 1000, on_life=fleet.heard
    )
    fleet.listen(lambda change: reader.set_pods(change.pods))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fleet.run())]
        begun_s = time.process_time()
        await fleet.wait_probed()
        admitted_s = time.process_time() - begun_s
        tasks.append(group.create_task(reader.run()))
        assert await reader.wait_warm(120.0), "the registry could not be loaded"
        warm_s = time.process_time() - begun_s - admitted_s
        pipe.send((admitted_s, warm_s))
        await asyncio.to_thread(pipe.recv)
        before = (time.process_time(), time.monotonic(), reader.status())
        await asyncio.to_thread(pipe.recv)
        after = (time.process_time(), time.monotonic(), reader.status())
        for task in tasks:
            task.cancel()
        wall_s = after[1] - before[1]
        pipe.send(
            {
                "core": (after[0] - before[0]) / wall_s,
                "messages": (after[2].messages - before[2].messages) / wall_s,
                "resyncs": after[2].resyncs - before[2].resyncs,
                "synced": after[2].pods_synced,
                "keys": index.statistics().keys,
                "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )


def readers(pipe: Connection, address: str, scene: Scene) -> None:
    """Read as the other gateways do, and discard the result."""
    asyncio.run(_readers(pipe, address, scene))


async def _readers(pipe: Connection, address: str, scene: Scene) -> None:
    pause_s = PAUSE_S * max(0.0, 1 - SMALL_FLEET / scene.pods)

    async def follow() -> None:
        incoming, outgoing = await asyncio.open_unix_connection(address, limit=2**22)
        parser = hiredis.Reader()
        tail: bytes = b"$"
        options = ("COUNT", str(READ_ENTRIES), "BLOCK", str(POLL_MS), "STREAMS", stream_key(MODEL))
        while True:
            outgoing.write(packed(("XREAD", *options, tail)))
            answer: Any = False
            while (answer := parser.gets()) is False:
                parser.feed(await incoming.read(2**18))
            if answer:
                tail = answer[0][1][-1][0]
            await asyncio.sleep(pause_s)

    tasks = [asyncio.create_task(follow()) for _ in range(scene.gateways - 1)]
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    pipe.send(None)


# -- measuring -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(work: Any, address: str, scene: Scene) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, address, scene), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


def measure(scene: Scene) -> str:
    """Return one line of the table."""
    with running_redis() as server, contextlib.ExitStack() as stack:
        address = server.url.removeprefix("unix://")
        told = stack.enter_context(_process(engines, address, scene))
        told.recv()
        client = redis.Redis.from_url(server.url)
        while int(client.dbsize()) < scene.pods:
            time.sleep(0.1)
        answering = None
        if scene.probes:
            answering = stack.enter_context(_process(answerers, address, scene))
            scene = replace(scene, probes=answering.recv())
        followed = stack.enter_context(_process(gateway, address, scene))
        admitted_s, warm_s = followed.recv()
        others = stack.enter_context(_process(readers, address, scene))
        others.recv()
        told.send("go")
        time.sleep(6.0)
        before, begun_s = _redis_cpu_s(client), time.monotonic()
        followed.send("go")
        others.send("go")
        time.sleep(scene.seconds)
        redis_core = (_redis_cpu_s(client) - before) / (time.monotonic() - begun_s)
        followed.send("stop")
        result = followed.recv()
        others.send("stop")
        others.recv()
        memory = client.info("memory")["used_memory"] / 2**20
        told.send("stop")
        told.recv()
        if answering is not None:
            answering.send("stop")
        client.close()
    return (
        f"| {scene.mode} | {scene.pods} | {scene.gateways} | {result['messages']:,.0f} | {100 * result['core']:.1f} % "
        f"| {1e6 * result['core'] / max(1.0, result['messages']):.0f} us | {100 * redis_core:.1f} % | {memory:.0f} MiB "
        f"| {result['synced']} | {result['resyncs']} | {admitted_s:.2f} s, {warm_s:.2f} s | {result['rss']} MiB |"
    )


def _redis_cpu_s(client: redis.Redis) -> float:
    info: Any = client.info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--modes", nargs="+", default=["idle", "served", "flat"], choices=["idle", "served", "flat"])
    parser.add_argument(
        "--requests", type=float, default=2000.0, help="requests per second over all engines; for `served`"
    )
    parser.add_argument("--told", type=int, default=None, help="fleet size that engines hear from gateways")
    parser.add_argument("--keys", type=int, default=2000, help="keys that an engine holds")
    parser.add_argument("--gateways", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--probes", action="store_true", help="the gateway probes the engines over HTTP as well")
    args = parser.parse_args()
    print(
        "| mode | pods | gateways | messages/s | gateway, core | per message | Redis, core | Redis, memory "
        "| synced | resyncs | CPU to admit, to warm | gateway, memory |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for pods in args.pods:
        for mode in args.modes:
            told = pods if args.told is None else args.told
            probes = "wanted" if args.probes else ""
            scene = Scene(pods, mode, args.requests, told, args.keys, args.gateways, args.seconds, probes)
            print(measure(scene), flush=True)


if __name__ == "__main__":
    main()
