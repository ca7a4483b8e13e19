"""Worker processes against a real server: together they act as one generator."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.load.client import Client
from loadgen.load.player import RunSpec, play
from loadgen.load.target import Target
from loadgen.load.workers import WorkerDied, play_parallel
from loadgen.workloads.published import PrefixRepetition
from loadgen.workloads.render import Renderer
from tests.conftest import wait_until
from tests.loadgen.load.scripted_server import Request, ScriptedServer, answer_well

WORKLOAD = PrefixRepetition(prefix_len=40, suffix_len=10, output_len=4)
SPEC = RunSpec(ArrivalSpec(ArrivalKind.POISSON, rate=100.0), seed=3, time_limit_s=60.0, sessions=60, salt="[salt] ")


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "loadgen.load.worker" in " ".join(child.cmdline())]


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie does not run: it is an ended orphan for which no parent waits."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_several_processes_play_the_schedule_of_one() -> None:
    server, heard = ScriptedServer(answer_well), []
    async with server.running() as url:
        parallel = await play_parallel(Target(url), WORKLOAD, 1.4, SPEC, 2, lambda *counts: heard.append(counts))
        by_two = sorted(request.body for request in server.requests if request.method == "POST")
        connections = {request.connection for request in server.requests}
        server.requests.clear()
        async with Client(Target(url)) as client:
            await client.model_id()
            single = await play(client, WORKLOAD, Renderer(1.4, SPEC.salt), SPEC)
        by_one = sorted(request.body for request in server.requests if request.method == "POST")
    assert by_two == by_one
    assert len(connections) >= 2
    assert heard[-1] == (60, 60, 0)
    assert heard == sorted(heard)
    assert (parallel.planned, len(parallel.records)) == (single.planned, len(single.records)) == (60, 60)
    one, two = single.records, parallel.records
    assert one.completed.all()
    assert two.completed.all()
    assert list(two.finished_s) == sorted(two.finished_s)
    for name in ("session", "intended_s", "prompt_hash", "prompt_tokens", "prompt_bytes"):
        first, second = (getattr(run, name)[np.argsort(run.session)] for run in (one, two))
        assert first == pytest.approx(second, abs=1e-9), name
    assert (two.lag_s > -0.01).all()
    assert children() == []


async def test_a_worker_that_dies_is_named_and_takes_the_others_along() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            await answer_well(request, writer)
        elif not killed:
            killed.append(children()[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    async with ScriptedServer(script).running() as url:
        with pytest.raises(WorkerDied, match=r"worker \d of 2 died \(killed by signal 9\): it printed nothing"):
            await play_parallel(Target(url), WORKLOAD, 1.4, SPEC, 2)
    assert killed
    assert children() == []


async def test_what_a_worker_cannot_do_is_said_in_its_words() -> None:
    async with ScriptedServer(answer_well).running() as url:
        pass
    with pytest.raises(WorkerDied, match=r"worker \d of 2 died \(exit code 1\): .*ServerUnusable.*/v1/models"):
        await play_parallel(Target(url), WORKLOAD, 1.4, SPEC, 2)
    assert children() == []


async def test_cancellation_ends_all_workers() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            await answer_well(request, writer)

    server = ScriptedServer(script)
    async with server.running() as url:
        task = asyncio.create_task(play_parallel(Target(url), WORKLOAD, 1.4, SPEC, 2))
        await wait_until(lambda: any(request.method == "POST" for request in server.requests), 60, "a request")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert children() == []


KILLED = """
import asyncio, sys
from loadgen.load.target import Target
from loadgen.load.workers import play_parallel
from tests.loadgen.load.test_load_workers import SPEC, WORKLOAD
asyncio.run(play_parallel(Target(sys.argv[1]), WORKLOAD, 1.4, SPEC, 2))
"""


async def test_a_parent_that_is_killed_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    async def never(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            await answer_well(request, writer)

    server = ScriptedServer(never)
    async with server.running() as url:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, url, env=environment)
        try:
            await wait_until(lambda: any(request.method == "POST" for request in server.requests), 60, "a request")
            workers = psutil.Process(parent.pid).children()
        finally:
            parent.kill()
            await parent.wait()
        assert len(workers) == 2
        await wait_until(lambda: not any(is_alive(worker) for worker in workers), 60, "the workers' end")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SPEC, arrivals=ArrivalSpec(ArrivalKind.CLOSED, concurrency=2)), "share a concurrency of 2"),
        (replace(SPEC, max_in_flight=1), "share a cap on requests in flight of 1: use at most 1"),
    ],
)
async def test_a_cap_too_small_to_share_is_refused(spec: RunSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await play_parallel(Target("http://nowhere.invalid"), WORKLOAD, 1.4, spec, 3)
