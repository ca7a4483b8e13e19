"""The host tier's memory, and the engines that copy KV blocks between it and the pool.

Both sides are block-major across layers, so a block is one piece, and so is a run of neighbouring blocks. The device's
copy engine moves a run in one copy, which takes no multiprocessor from the steps.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.tiers.copies.base import (
    BlockPair,
    BlockRun,
    CopyError,
    Direction,
    EndedJob,
    FinishedCopy,
    Moved,
    RunningJob,
)
from engine.tiers.copies.copier import BlockCopier

_POLL_S = 50e-6


class HostMemoryError(Exception):
    """The host tier cannot get its memory; the text names the wanted size and what to lower.

    A caller that catches it must end the process: after a refused page-lock CUDA keeps the error, torch cannot clear
    it, and a later launch would report it as its own.
    """


class HostPool:
    """KV blocks in host memory: `data` is [slot, byte], and a slot is as large as a block of the pool.

    For a pool on a CUDA device the memory is page-locked, because copies are asynchronous only then. It is registered,
    because torch's pinned allocator rounds up to a power of two, which is up to twice the memory. It is unlocked by
    `close`, when the last reference to `data` ends, or when the process ends.
    """

    def __init__(self, pool: Tensor, slots: int) -> None:
        """`pool`: [block, ...], contiguous. Raises HostMemoryError, and ValueError for fewer than one slot."""
        if slots < 1:
            raise ValueError(f"the host tier needs at least 1 slot, got {slots}")
        self.slot_bytes = pool[0].nbytes
        wanted = f"the host tier of {slots} blocks of {self.slot_bytes} bytes ({slots * self.slot_bytes} bytes)"
        try:
            self.data = torch.empty((slots, self.slot_bytes), dtype=torch.uint8)
        except RuntimeError as error:
            raise HostMemoryError(f"{wanted} does not fit the host's memory; lower its size: {error}") from None
        self._unlock: Callable[[], object] | None = None
        if pool.device.type == "cuda":
            self._pin(pool.device, wanted)

    def close(self) -> None:
        """Unlock the memory. No copy may be in flight. Closing twice is harmless."""
        if self._unlock is not None:
            self._unlock()

    def _pin(self, device: torch.device, wanted: str) -> None:
        address = self.data.data_ptr()
        with torch.cuda.device(device):
            status = int(_cudart().cudaHostRegister(address, self.data.nbytes, 0))
        if status:
            raise HostMemoryError(
                f"{wanted} cannot be page-locked (CUDA error {status}); lower its size, or raise the limit of locked "
                "memory (ulimit -l)"
            )
        # Bound to the tensor, not to this object: a copy engine may hold the last reference to the memory.
        unlock = weakref.finalize(self.data, _unlock, device, address)
        unlock.atexit = False  # copies may be in flight at exit
        self._unlock = unlock


def _unlock(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Memory:
    """Both sides as bytes, so that a copy keeps every bit of any type."""

    def __init__(self, pool: Tensor, host: HostPool) -> None:
        """`pool`: [block, ...]. Raises ValueError if pool and host do not match."""
        if not pool.is_contiguous() or pool[0].nbytes != host.slot_bytes:
            raise ValueError(f"pool blocks must be contiguous and as large as a host slot ({host.slot_bytes} bytes)")
        self._pool = pool.view(torch.uint8).view(len(pool), -1)
        self._host = host.data
        self.block_bytes = host.slot_bytes
        self.pool_blocks = len(pool)
        self.host_slots = len(host.data)

    def sides(self, run: BlockRun) -> tuple[Tensor, Tensor]:
        """Return target and source of the run, [blocks, byte] each."""
        demotes = run.direction is Direction.DEMOTE
        source, target = (self._pool, self._host) if demotes else (self._host, self._pool)
        return target[run.target : run.target + run.blocks], source[run.source : run.source + run.blocks]


class CpuBlockMover(_Memory):
    """The mover for a pool in host memory."""

    def move(self, run: BlockRun) -> Moved:
        """See `BlockMover.move`."""
        target, source = self.sides(run)
        start_s = time.perf_counter()
        target.copy_(source)
        return Moved(run.blocks, time.perf_counter() - start_s)


class CudaCopyEngine(_Memory):
    """The engine for a pool on a card. Each direction has its own stream, so copies and steps run in parallel.

    Jobs of a direction follow one another, so the time between a job's two events is the time of its bytes alone.
    """

    def __init__(self, pool: Tensor, host: HostPool) -> None:
        super().__init__(pool, host)
        self._device = pool.device
        self._streams = {direction: torch.cuda.Stream(pool.device) for direction in Direction}  # type: ignore[no-untyped-call]

    def start(self, job: Sequence[BlockRun]) -> RunningJob:
        """See `CopyEngine.start`. It does not change the caller's current stream and device."""
        begin, end = _event(), _event()
        stream = self._streams[job[0].direction]
        try:
            with torch.cuda.stream(stream):
                begin.record(stream)
                for run in job:
                    target, source = self.sides(run)
                    target.copy_(source, non_blocking=True)
                end.record(stream)
        except RuntimeError as error:
            raise CopyError(str(error)) from error
        return _CudaJob(self._device, begin, end, job)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _CudaJob:
    device: torch.device
    begin: torch.cuda.Event
    end: torch.cuda.Event
    job: Sequence[BlockRun]

    def ended(self) -> EndedJob | None:
        """See `RunningJob.ended`. An error of the card fails all runs, because it does not say which run failed."""
        try:
            with torch.cuda.device(self.device):  # otherwise a thread would open a context on the first card
                if not self.end.query():  # type: ignore[no-untyped-call]
                    return None
                seconds = self.begin.elapsed_time(self.end) / 1e3
        except RuntimeError as error:
            return EndedJob(Moved(0, 0.0), [str(error)] * len(self.job))
        return EndedJob(Moved(sum(run.blocks for run in self.job), seconds))


def drain(copier: BlockCopier, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> list[FinishedCopy]:
    """Poll until no copy is open, and return the ended copies. Raises TimeoutError after `deadline_s` seconds.

    It blocks the thread: use it for shutting down and for measuring, not on the event loop. A copy that waits for a
    step times out unless the step's end is reported.
    """
    until_s = clock() + deadline_s
    finished = copier.poll()
    while copier.open_copies:
        if clock() >= until_s:
            raise TimeoutError(f"{copier.open_copies} copies of KV blocks have not ended within {deadline_s} s")
        time.sleep(_POLL_S)
        finished += copier.poll()
    return finished


def measure_rates(copier: BlockCopier, blocks: int, deadline_s: float) -> None:
    """Learn both directions' rates from real copies: pool blocks 0 .. blocks - 1 to the host slots of the same numbers
    and back. Call it at the start, while both are empty: without a rate nothing is fetched, and without a fetch no rate
    is measured."""
    pairs = [BlockPair(i, i) for i in range(blocks)]
    for request in (copier.demote, copier.promote):
        request(pairs)
        failed = [end.error for end in drain(copier, deadline_s) if end.error is not None]
        if failed:
            raise CopyError(failed[0])
