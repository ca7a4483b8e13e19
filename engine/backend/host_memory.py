"""The host tier's memory, and what copies KV blocks between it and a pool in host memory.

Both sides are block-major across layers, so a block is one piece, and so is a run of neighbouring blocks.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from engine.tiers.copies.base import BlockRun, Direction, Moved


class HostMemoryError(Exception):
    """The host tier cannot get its memory; the text names the wanted size and what to lower.

    A caller that catches it must end the process: after a refused page-lock CUDA keeps the error, torch cannot clear
    it, and a later launch would report it as its own.
    """


class HostPool:
    """KV blocks in host memory: `data` is [slot, byte], and a slot is as large as a block of the pool."""

    def __init__(self, pool: Tensor, slots: int) -> None:
        """`pool`: [block, ...], contiguous. Raises HostMemoryError, and ValueError for fewer than one slot."""
        if slots < 1:
            raise ValueError(f"the host tier needs at least 1 slot, got {slots}")
        self.slot_bytes = pool[0].nbytes
        self.size_text = f"the host tier of {slots} blocks of {self.slot_bytes} bytes ({slots * self.slot_bytes} bytes)"
        try:
            self.data = torch.empty((slots, self.slot_bytes), dtype=torch.uint8)
        except RuntimeError as error:
            raise HostMemoryError(f"{self.size_text} does not fit the host's memory; lower its size: {error}") from None


class BothSides:
    """Pool and host memory as bytes, so that a copy keeps every bit of any type."""

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


class CpuBlockMover(BothSides):
    """The mover for a pool in host memory."""

    def move(self, run: BlockRun) -> Moved:
        """See `BlockMover.move`."""
        target, source = self.sides(run)
        start_s = time.perf_counter()
        target.copy_(source)
        return Moved(run.blocks, time.perf_counter() - start_s)
