"""Plays an arm with several processes: the same sessions at the same times as one process would play."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import loadgen.load.worker as worker
from loadgen.load.arrivals import ArrivalKind
from loadgen.load.clock import clock_of
from loadgen.load.player import ArmRun, RunSpec, take_cancellation
from loadgen.load.process import first_of
from loadgen.load.target import ServerUnusable, Target
from loadgen.measure.records import Records
from loadgen.workloads.base import Workload

READY_S = 60.0
"""Time limit for a worker to import its modules, to unpickle its job and to ask for the model."""
LEAD_S = 0.2
"""Time between the start message and the start: by then, every worker has it and has built its first requests."""
GRACE_S = 60.0
"""Extra time after the run's time limit, for writing the records."""
KILL_AFTER_S = 5.0
TAIL_BYTES = 4096

OnProgress = Callable[[int, int, int], None]


class WorkerDied(ServerUnusable):
    """A worker process ended before its work was done; the message has the worker's name and last line of output."""


class _Worker:
    """The parent's view of one worker process."""

    def __init__(self, name: str, process: Process) -> None:
        self.counts = (0, 0, 0)
        self.planned = 0
        self.duration_s = 0.0
        self._is_done = False
        self._name = name
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._input, self._output = process.stdin, process.stdout
        self._words = asyncio.create_task(_tail(process.stderr))

    async def ready(self, job: worker.Job) -> None:
        """Send the job and wait until the worker is ready to start."""
        with contextlib.suppress(ConnectionError):  # it died, which reading its output will show
            self._input.write(pickle.dumps(job))
            await self._input.drain()
        await self._line()

    async def play(self, start_s: float, progressed: Callable[[], None]) -> None:
        """Let the worker play from the instant `start_s` until it is done."""
        with contextlib.suppress(ConnectionError):
            self._input.write(f"start {start_s!r}\n".encode())
            await self._input.drain()
        await self._until_done(progressed)

    async def end_early(self) -> None:
        """Let the worker end its run now, and wait until it has written what was measured."""
        with contextlib.suppress(ConnectionError):
            self._input.write(b"stop\n")
            await self._input.drain()
        await self._until_done(lambda: None)

    async def _until_done(self, progressed: Callable[[], None]) -> None:
        if self._is_done:
            return
        while (words := await self._line())[0] == "progress":
            sent, completed, failed = map(int, words[1:])
            self.counts = (sent, completed, failed)
            progressed()
        self.planned, self.duration_s = int(words[1]), float(words[2])
        self._is_done = True

    async def stop(self) -> None:
        """Ask the worker to stop; kill it if it does not."""
        self._input.close()
        try:
            await asyncio.wait_for(self._process.wait(), KILL_AFTER_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._words

    async def _line(self) -> list[str]:
        if line := await self._output.readline():
            return line.decode().split()
        code = await self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise WorkerDied(f"{self._name} died ({how}): {await self._words or 'it printed nothing'}")


async def play_parallel(
    target: Target,
    workload: Workload,
    tokens_per_word: float,
    spec: RunSpec,
    workers: int,
    on_progress: OnProgress | None = None,
) -> ArmRun:
    """Play an arm with `workers` processes, sessions dealt round robin, from one common start.

    `on_progress` gets totals of requests sent, completed and failed. Caps (closed loop, `max_in_flight`) are divided
    too: each process keeps its share. No process is left at the end, whether the run succeeds or not. Raises
    WorkerDied, and ValueError if a cap is too small to share.
    """
    specs = [_share(spec, number, workers) for number in range(workers)]
    with tempfile.TemporaryDirectory(prefix="warmroute-loadgen-") as base:
        folders = [Path(base) / str(number) for number in range(workers)]
        jobs = []
        for share, folder in zip(specs, folders, strict=True):
            folder.mkdir()
            jobs.append(worker.Job(target, workload, tokens_per_word, share, folder))
        async with _crew(workers) as crew:
            return await _play(crew, jobs, spec, on_progress or (lambda sent, completed, failed: None))


async def _play(crew: list[_Worker], jobs: list[worker.Job], spec: RunSpec, on_progress: OnProgress) -> ArmRun:
    async with _deadline(READY_S, "the worker processes were not ready"):
        await _together([one.ready(job) for one, job in zip(crew, jobs, strict=True)])
    start_s = clock_of(asyncio.get_running_loop())() + LEAD_S

    def progressed() -> None:
        on_progress(*(sum(counts) for counts in zip(*(one.counts for one in crew), strict=True)))

    is_partial = False
    try:
        async with _deadline(LEAD_S + spec.time_limit_s + GRACE_S, "the worker processes were not done"):
            await _together([one.play(start_s, progressed) for one in crew])
    except asyncio.CancelledError:
        # A worker without any ended request discards its run and ends, which fails this one.
        if not (spec.keeps_partial and all(completed + failed for _, completed, failed in (o.counts for o in crew))):
            raise
        is_partial = take_cancellation()
        async with _deadline(GRACE_S, "the worker processes did not end"):
            await _together([one.end_early() for one in crew])
    records = Records.merge([Records.load(job.folder) for job in jobs])
    planned, duration_s = sum(one.planned for one in crew), max(one.duration_s for one in crew)
    return ArmRun(records, planned, start_s, duration_s, is_partial)


@contextlib.asynccontextmanager
async def _crew(workers: int) -> AsyncIterator[list[_Worker]]:
    crew: list[_Worker] = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        for number in range(workers):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", worker.__name__, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment
            )
            crew.append(_Worker(f"worker {number + 1} of {workers}", process))
        yield crew
    finally:
        await asyncio.gather(*(one.stop() for one in crew))


def _share(spec: RunSpec, number: int, workers: int) -> RunSpec:
    arrivals, cap = spec.arrivals, spec.max_in_flight
    if arrivals.kind is ArrivalKind.CLOSED:
        arrivals = replace(arrivals, concurrency=_part(arrivals.concurrency, number, workers, "concurrency"))
    if cap is not None:
        cap = _part(cap, number, workers, "cap on requests in flight")
    return replace(spec, arrivals=arrivals, max_in_flight=cap, worker=number, workers=workers)


def _part(whole: int, number: int, workers: int, what: str) -> int:
    if whole < workers:
        raise ValueError(f"{workers} workers cannot share a {what} of {whole}: use at most {whole} workers")
    return whole // workers + (number < whole % workers)


async def _together(works: list[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except BaseExceptionGroup as group:
        raise first_of(group) from None


@contextlib.asynccontextmanager
async def _deadline(limit_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise WorkerDied(f"{what} within {limit_s:g} s") from None


async def _tail(stream: asyncio.StreamReader) -> str:
    """Return the last line of the stream; in a traceback, that line has the error."""
    last = b""
    while piece := await stream.read(TAIL_BYTES):
        last = (last + piece)[-TAIL_BYTES:]
    return last.decode(errors="replace").strip().rpartition("\n")[2]
