"""Copies of KV blocks between a pool on a card and page-locked host memory.

The device's copy engine moves a run of blocks in one copy, which takes no multiprocessor from the steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backend.host_memory import BothSides, HostMemoryError, HostPool
from engine.tiers.copies.base import BlockRun, CopyError, Direction, EndedJob, Moved, RunningJob


class PageLockedPool(HostPool):
    """Host memory that is page-locked, because copies are asynchronous only then.

    It is registered, because torch's pinned allocator rounds up to a power of two, which is up to twice the memory. It
    is unlocked by `close`, when the last reference to `data` ends, or when the process ends.
    """

    def __init__(self, pool: Tensor, slots: int) -> None:
        """`pool`: [block, ...], contiguous, on a card. Raises HostMemoryError, and ValueError for fewer than one
        slot."""
        super().__init__(pool, slots)
        address = self.data.data_ptr()
        with torch.cuda.device(pool.device):
            status = int(_cudart().cudaHostRegister(address, self.data.nbytes, 0))
        if status:
            raise HostMemoryError(
                f"{self.size_text} cannot be page-locked (CUDA error {status}); lower its size, or raise the limit of "
                "locked memory (ulimit -l)"
            )
        # Bound to the tensor, not to this object: a copy engine may hold the last reference to the memory.
        self._unlock = weakref.finalize(self.data, _unlock, pool.device, address)
        self._unlock.atexit = False  # copies may be in flight at exit

    def close(self) -> None:
        """Unlock the memory. No copy may be in flight. Closing twice is harmless."""
        self._unlock()


def _unlock(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaCopyEngine(BothSides):
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
