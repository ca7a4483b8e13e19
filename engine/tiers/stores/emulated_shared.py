"""A shared tier of emulated engines in one process: nothing is stored, but everything takes the time it would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.tiers.copies.base import BlockRun, Direction, RunningJob
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.block_file import Label
from engine.tiers.stores.emulated import EmulatedCopies, Timers
from engine.tiers.stores.janitor import FILL, FULL, by_use
from engine.tiers.stores.lookups import Lookup
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import SharedSize
from engine.tiers.stores.store import LIMITS, Store


@dataclass(eq=False)
class EmulatedFolder:
    """The content of a folder that engines share: at most `blocks` blocks. Room is made as in `Janitor`."""

    timers: Timers
    blocks: int
    used_s: dict[bytes, float] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    evicted: int = 0

    def use(self, label: Label) -> bool:
        """Mark the block as used, because it is read or was to be stored; return whether it is there."""
        if label.digest not in self.used_s:
            return False
        self.used_s[label.digest] = self.timers.time()
        return True

    def store(self, label: Label) -> None:
        """Add the block; make room if the folder is too full."""
        self.used_s[label.digest] = self.timers.time()
        self.parents[label.digest] = label.parent
        if len(self.used_s) > FULL * self.blocks:
            for digest in by_use(self.used_s, self.parents)[: len(self.used_s) - int(FILL * self.blocks)]:
                del self.used_s[digest], self.parents[digest]
                self.evicted += 1

    def leading(self, digests: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, are there."""
        return next((i for i, digest in enumerate(digests) if digest not in self.used_s), len(digests))

    def forget_all(self) -> None:
        """Forget everything."""
        self.used_s.clear()
        self.parents.clear()


class _SharedCopies(EmulatedCopies):
    """Copies between a pod and the folder. Present blocks are not written again, and missing ones cannot be read."""

    def __init__(
        self, folder: EmulatedFolder, *, pool_blocks: int, slots: int, block_bytes: int, bytes_per_s: float
    ) -> None:
        super().__init__(
            folder.timers, pool_blocks=pool_blocks, host_slots=slots, block_bytes=block_bytes, bytes_per_s=bytes_per_s
        )
        self._folder = folder
        self.labels: dict[int, Label] = {}

    def start(self, job: Sequence[BlockRun]) -> RunningJob:
        """See `CopyEngine.start`. A block can be read as soon as the copy to the folder begins."""
        if job[0].direction is Direction.PROMOTE:
            there = [all(self._folder.use(self.labels[pair.source]) for pair in run.pairs) for run in job]
            moved = sum(run.blocks for run, is_there in zip(job, there, strict=True) if is_there)
            return self._moving(job, moved, [None if is_there else "gone" for is_there in there])
        moved = 0
        for pair in (pair for run in job for pair in run.pairs):
            if not self._folder.use(label := self.labels[pair.target]):
                self._folder.store(label)
                moved += 1
        return self._moving(job, moved)


@dataclass(eq=False)
class _Asked:
    folder: EmulatedFolder
    digests: Sequence[bytes]
    known_at_s: float

    def found(self) -> int | None:
        """See `Lookup.found`."""
        return self.folder.leading(self.digests) if self.folder.timers.time() >= self.known_at_s else None

    def cancel(self) -> None:
        """See `Lookup.cancel`."""


@dataclass(eq=False)
class _Lookups:
    folder: EmulatedFolder
    seconds: float
    on_end: Callable[[], None] | None = None

    def ask(self, digests: Sequence[bytes], parent: bytes) -> Lookup | None:
        """See `Lookups.ask`."""
        known_at_s = self.folder.timers.time() + self.seconds
        self.folder.timers.call_at(known_at_s, self._known)
        return _Asked(self.folder, digests, known_at_s)

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """See `TellingLookups.tell`."""
        self.on_end = on_end

    def _known(self) -> None:
        if self.on_end is not None:
            self.on_end()


@dataclass(eq=False)
class _Side:
    folder: EmulatedFolder
    copies: _SharedCopies
    lookups: _Lookups

    def describe(self, block: int, label: Label) -> None:
        """Note what the block holds or will hold."""
        self.copies.labels[block] = label

    def size(self) -> SharedSize:
        """Return what the folder holds."""
        size = self.copies.block_bytes
        events = {"evicted": self.folder.evicted}
        return SharedSize(self.folder.blocks * size, len(self.folder.used_s) * size, events)

    def reset(self) -> None:
        """Forget everything."""
        self.folder.forget_all()

    def close(self) -> None:
        """Nothing to free."""


def emulated_shared_store(
    folder: EmulatedFolder, *, pool_blocks: int, block_bytes: int, bytes_per_s: float, lookup_s: float
) -> Store:
    """Build a pod's side of the folder. `pool_blocks`: blocks of the tier above it; `bytes_per_s`: rate of this pod in
    each direction; `lookup_s`: seconds that a look-up takes."""
    copies = _SharedCopies(
        folder, pool_blocks=pool_blocks, slots=folder.blocks, block_bytes=block_bytes, bytes_per_s=bytes_per_s
    )
    copier = BlockCopier(copies, folder.timers.time, LIMITS)
    for direction in Direction:
        copier.learn_rate(direction, int(bytes_per_s), 1.0)
    side = _Side(folder, copies, _Lookups(folder, lookup_s))
    return Store(Place.SHARED, folder.blocks, block_bytes, copier, copies, shared=side)
