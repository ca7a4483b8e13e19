"""A worker process: plays its share of an arm's sessions. `python -m loadgen.load.worker`, started by `workers.py`.

Standard input brings the job as a pickle, then the line `start INSTANT`, then perhaps `stop`, which ends the run early.
The end of the input ends the process. Standard output gets the lines `ready`, `progress SENT COMPLETED FAILED` (a few
times a second) and `done PLANNED DURATION`. By then the records are in the job's folder. They stay until the input
ends, so nothing is left behind if the parent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop

from engine.common.collector import quiet_collector
from loadgen.load.client import Client
from loadgen.load.player import RunSpec, Tally, play
from loadgen.load.target import Target
from loadgen.workloads.base import Workload
from loadgen.workloads.render import Renderer

PROGRESS_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a worker needs to know."""

    target: Target
    workload: Workload
    tokens_per_word: float
    spec: RunSpec
    folder: Path


def main() -> None:
    """Play the job from standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal, but the parent decides
    job: Job = pickle.load(sys.stdin.buffer)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            uvloop.run(_work(job))
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other workers' folders are in it, or the parent removed it
            job.folder.parent.rmdir()


async def _work(job: Job) -> None:
    loop, tally = asyncio.get_running_loop(), Tally()
    started: asyncio.Future[float] = loop.create_future()
    task = asyncio.current_task()
    assert task is not None
    loop.add_reader(sys.stdin.fileno(), _listen, started, task)
    async with quiet_collector(lambda: tally.is_idle):  # collects before the start, not after it
        await _play(job, started, tally)
        await loop.create_future()  # until the parent has read the records or has died


async def _play(job: Job, started: asyncio.Future[float], tally: Tally) -> None:
    async with Client(job.target) as client:
        await client.model_id()
        _say("ready")
        start_s = await started
        reports = asyncio.create_task(_report(tally))
        try:
            renderer = Renderer(job.tokens_per_word, job.spec.salt)
            run = await play(client, job.workload, renderer, job.spec, start_s=start_s, tally=tally)
        finally:
            reports.cancel()
    run.records.save(job.folder)
    _say(f"progress {tally.sent} {tally.completed} {tally.failed}")
    _say(f"done {run.planned} {run.duration_s!r}")


def _listen(started: asyncio.Future[float], task: asyncio.Task[None]) -> None:
    line = os.read(sys.stdin.fileno(), 1024)
    if line and not started.done():
        started.set_result(float(line.split()[1]))
    elif line:
        task.cancel()  # `play` keeps what was measured
    else:  # the parent no longer needs this worker, or has died
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        task.cancel()


async def _report(tally: Tally) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        _say(f"progress {tally.sent} {tally.completed} {tally.failed}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
