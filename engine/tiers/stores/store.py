"""A tier without its index: where its blocks lie, and the copies between it and the tier above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.tiers.copies.base import CopyEngine
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.stores.block_file import Label
from engine.tiers.stores.disk import OpenDisk
from engine.tiers.stores.lookups import TellingLookups
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import SharedSize

_MIB = 1 << 20
LIMITS = CopyLimits(job_bytes=4 * _MIB, in_flight_bytes=16 * _MIB, half_life_bytes=256 * _MIB)
"""Limits of copies on threads. After a copy is given up, the bytes in flight are still copied."""


class TierError(Exception):
    """A tier cannot be built; the text names the setting and the remedy."""


class _Telling(CopyEngine, Protocol):
    """Copies that report their end."""

    def tell(self, on_end: Callable[[], None] | None) -> None: ...
    def close(self) -> None: ...


class SharedSide(Protocol):
    """A shared tier without its copies."""

    @property
    def lookups(self) -> TellingLookups: ...
    @property
    def describe(self) -> Callable[[int, Label], None]: ...
    def size(self) -> SharedSize: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Store:
    """A tier without its index: room for blocks, and measured copies between it and the tier above it."""

    tier: Place
    blocks: int
    block_bytes: int
    copier: BlockCopier
    telling: _Telling | None = None
    """The copies, if they report their end."""
    memory: memoryview | None = None
    """The host tier's blocks, one after the other, for a tier below that reads and writes them."""
    disk: OpenDisk | None = None
    """What the disk tier writes to; None for other tiers."""
    shared: SharedSide | None = None
    """The other parts of a tier to which other engines write, too; None for other tiers."""
    beside: float = 0.0
    """See `Link`."""

    def close(self) -> None:
        """Begin no further copy. Blocks the calling thread for at most a second."""
        if self.shared is not None:
            self.shared.close()
        if self.telling is not None:
            self.telling.close()
        if self.disk is not None:
            self.disk.close()


def slots_of(setting: str, tier_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit. Raises TierError, which names the setting, if none does."""
    if tier_bytes < block_bytes:
        raise TierError(f"{setting} {tier_bytes} holds no block: one block takes {block_bytes} bytes")
    return tier_bytes // block_bytes
