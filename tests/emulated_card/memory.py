"""A card's memory: what is allocated, the figures that torch reports, and the host's page-locked memory."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.emulated_card.streams import Stream

_ROUND = 512
"""torch's allocator rounds up to a multiple of this many bytes."""
_POISON = 0xFF
"""A number with this value in every byte is NaN in each floating-point type, and -1 in each signed integer type."""
_POISONED = 1 << 28
"""Regions of more bytes are not poisoned: tests allocate them for their addresses and touch little of them."""


def poison(data: Tensor) -> None:
    """Overwrite bytes [n] whose values nobody may use."""
    if len(data) <= _POISONED:
        data.fill_(_POISON)


@dataclass(eq=False)
class Pool:
    """Freed memory, which the next allocation of the same size gets. A pool belongs to a stream, or to graphs."""

    unused: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Freed memory by its rounded size."""


@dataclass(frozen=True, eq=False)
class Region:
    """Bytes of the card."""

    data: Tensor
    """uint8 [n] in host memory, where n is the rounded size."""
    stream: Stream
    """The next user must use the memory in this stream's order. It need not wait for other streams."""
    pool: Pool


class Allocation:
    """Memory of the card, as long as a tensor refers to it."""

    def __init__(self, memory: Memory, region: Region) -> None:
        self._memory = memory
        self.region = region

    def __del__(self) -> None:
        # This may run in the middle of any line of this module, so it only fills a list, which the card reads later.
        self._memory.given_back.append(self.region)


class Memory:
    """The card's memory. All figures are in bytes, as `torch.cuda` gives them. Callers hold the card's lock."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.allocated = self.reserved = 0
        self.max_allocated = self.max_reserved = 0
        self.given_back: deque[Region] = deque()
        """Memory to which no tensor refers any more. `Card.take_back` has yet to take it."""
        self._pools: defaultdict[Stream, Pool] = defaultdict(Pool)
        self.locked: list[range] = []
        """Page-locked addresses of the host."""
        self._kept: list[Tensor] = []

    def allocate(self, size: int, stream: Stream, pool: Pool | None = None) -> Allocation:
        """Return memory from a graph's pool, or from the stream's own pool (None). The memory is poisoned at the latest
        when the stream has done its earlier work. Raises torch.OutOfMemoryError."""
        pool, rounded = pool or self._pools[stream], _rounded(size)
        taken = self.allocated + rounded
        if taken > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes; {self.total - self.allocated} are free."
            )
        self.allocated = taken
        self.reserved = max(self.reserved, taken)
        self.max_allocated = max(self.max_allocated, taken)
        self.max_reserved = max(self.max_reserved, self.reserved)
        if pool.unused[rounded]:
            data = pool.unused[rounded].pop()
        else:
            with torch.inference_mode(False):
                data = torch.empty(rounded, dtype=torch.uint8, device="cpu")
                poison(data)
        return Allocation(self, Region(data, stream, pool))

    def free(self, region: Region) -> None:
        """Take back an allocation's memory. The caller makes the memory's stream poison it."""
        size = len(region.data)
        self.allocated -= size
        if size <= _POISONED:
            region.pool.unused[size].append(region.data)

    def empty_cache(self) -> None:
        """Return unallocated memory to the driver."""
        self.reserved = self.allocated
        for pool in self._pools.values():
            pool.unused.clear()

    def reset_peaks(self) -> None:
        """Set the peaks to what is allocated and reserved now."""
        self.max_allocated, self.max_reserved = self.allocated, self.reserved

    def keep_locked(self, made: Tensor) -> None:
        """Note a host tensor from torch's allocator of page-locked memory, which never unlocks any."""
        self._kept.append(made)
        self.lock_pages(made.data_ptr(), made.nbytes)
        poison(made.as_strided((made.numel(),), (1,)).view(torch.uint8))

    def lock_pages(self, start: int, size: int) -> bool:
        """Page-lock host memory. Return False if some of it is locked already."""
        wanted = range(start, start + size)
        if any(wanted.start < taken.stop and taken.start < wanted.stop for taken in self.locked):
            return False
        self.locked.append(wanted)
        return True

    def unlock_pages(self, start: int) -> bool:
        """Undo `lock_pages`. Return False if nothing was locked there."""
        found = [taken for taken in self.locked if taken.start == start]
        for taken in found:
            self.locked.remove(taken)
        return bool(found)

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether a host tensor is in page-locked memory."""
        start = tensor.data_ptr()
        return any(start in taken for taken in self.locked)


def _rounded(size: int) -> int:
    return -(-size // _ROUND) * _ROUND
