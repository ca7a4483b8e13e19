"""The host tier's memory, and the engines that copy KV blocks between it and the pool.

Both sides are block-major across layers, so a block is one piece, and neighbouring blocks are one piece too: a run is
one copy of the device's copy engine, which takes no multiprocessor from the steps that compute.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backend.tiers.base import BlockPair, BlockRun, CopyEngine, CopyError, Direction, FinishedCopy, RunningCopy
from engine.backend.tiers.copier import BlockCopier

_POLL_S = 50e-6


class HostMemoryError(Exception):
    """The host tier does not get its memory; the text says how much it wanted and what to lower.

    Whoever catches it ends the process: after a refused page-lock CUDA keeps the error, which torch cannot take away,
    and which a later launch would report as its own.
    """


class HostPool:
    """KV blocks in host memory: `data` is [slot, byte], a slot as large as a block of the pool.

    For a pool on a CUDA device the memory is page-locked, as copies are asynchronous only then. It is registered rather
    than taken from torch's pinned allocator, which rounds up to a power of two: up to twice the memory. It is unlocked
    by `close`, or when nobody refers to `data` any more; the end of the process unlocks it without either.
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
        # Of the tensor, not of this object: a copy engine may be the last that refers to the memory.
        unlock = weakref.finalize(self.data, _unlock, device, address)
        unlock.atexit = False  # by then copies may be in flight
        self._unlock = unlock


def _unlock(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def copy_engine(pool: Tensor, host: HostPool) -> CopyEngine:
    """The engine for where `pool` [block, ...] is. Raises ValueError where the two do not fit each other."""
    if not pool.is_contiguous() or pool[0].nbytes != host.slot_bytes:
        raise ValueError(f"pool blocks must be contiguous and as large as a host slot ({host.slot_bytes} bytes)")
    return CudaCopyEngine(pool, host) if pool.device.type == "cuda" else CpuCopyEngine(pool, host)


class _Memory:
    """Both sides as bytes, so that a copy keeps every bit, whatever the type."""

    def __init__(self, pool: Tensor, host: HostPool) -> None:
        self._pool = pool.view(torch.uint8).view(len(pool), -1)
        self._host = host.data
        self.block_bytes = host.slot_bytes
        self.pool_blocks = len(pool)
        self.host_slots = len(host.data)

    def sides(self, run: BlockRun) -> tuple[Tensor, Tensor]:
        """Target and source of the run, [blocks, byte] each."""
        demotes = run.direction is Direction.DEMOTE
        source, target = (self._pool, self._host) if demotes else (self._host, self._pool)
        return target[run.target : run.target + run.blocks], source[run.source : run.source + run.blocks]


class CpuCopyEngine(_Memory):
    """For a pool in host memory: a run has ended when `start` returns."""

    def start(self, run: BlockRun) -> RunningCopy:
        """See `CopyEngine.start`."""
        target, source = self.sides(run)
        start_s = time.perf_counter()
        target.copy_(source)
        return _Ended(time.perf_counter() - start_s)


@dataclass(frozen=True, slots=True)
class _Ended:
    seconds: float

    def elapsed_s(self) -> float | None:
        """See `RunningCopy.elapsed_s`."""
        return self.seconds


class CudaCopyEngine(_Memory):
    """A stream per direction, none of them the steps': the link carries both directions at once, beside computing.

    Runs of a direction follow one another, so the time between a run's two events is the time of its bytes alone.
    """

    def __init__(self, pool: Tensor, host: HostPool) -> None:
        super().__init__(pool, host)
        self._device = pool.device
        self._streams = {direction: torch.cuda.Stream(pool.device) for direction in Direction}  # type: ignore[no-untyped-call]

    def start(self, run: BlockRun) -> RunningCopy:
        """See `CopyEngine.start`. The caller's current stream and device stay as they are."""
        target, source = self.sides(run)
        begin, end = _event(), _event()
        stream = self._streams[run.direction]
        try:
            with torch.cuda.stream(stream):
                begin.record(stream)
                target.copy_(source, non_blocking=True)
                end.record(stream)
        except RuntimeError as error:
            raise CopyError(str(error)) from error
        return _CudaRun(self._device, begin, end)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _CudaRun:
    device: torch.device
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def elapsed_s(self) -> float | None:
        """See `RunningCopy.elapsed_s`."""
        try:
            with torch.cuda.device(self.device):  # a thread that named no card would open a context on the first one
                has_ended = self.end.query()  # type: ignore[no-untyped-call]
                return self.begin.elapsed_time(self.end) / 1e3 if has_ended else None
        except RuntimeError as error:
            raise CopyError(str(error)) from error


def drain(copier: BlockCopier, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> list[FinishedCopy]:
    """Poll until no copy is open, and return their ends. Raises TimeoutError after `deadline_s` seconds.

    Blocks the thread: for shutting down and for measuring, not for the event loop. Copies that wait for a step which
    nobody reports would time out.
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
    """Learn both directions' rates from real copies: pool blocks 0 .. blocks - 1 to the host slots of these numbers and
    back. For the start, when neither holds anything: without it nothing would ever be fetched, so nothing measured."""
    pairs = [BlockPair(i, i) for i in range(blocks)]
    for request in (copier.demote, copier.promote):
        request(pairs)
        failed = [end.error for end in drain(copier, deadline_s) if end.error is not None]
        if failed:
            raise CopyError(failed[0])
