"""A shared tier of emulated engines in one process: nothing is stored, and everything takes its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.backend.tiers.base import BlockRun, CopyError, Direction, RunningCopy
from engine.backend.tiers.copier import BlockCopier
from engine.tiers.block_file import Label
from engine.tiers.build import LIMITS, Store
from engine.tiers.emulated import EmulatedCopies, Timers
from engine.tiers.janitor import FILL, FULL, by_use
from engine.tiers.lookups import Lookup
from engine.tiers.place import Place
from engine.tiers.stats import SharedSize


@dataclass(eq=False)
class EmulatedFolder:
    """What a folder holds that engines share: at most `blocks` blocks, made room for as `Janitor` does it."""

    timers: Timers
    blocks: int
    used_s: dict[bytes, float] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    evicted: int = 0

    def use(self, label: Label) -> bool:
        """The block is read, or was to be stored; whether it is there."""
        if label.digest not in self.used_s:
            return False
        self.used_s[label.digest] = self.timers.time()
        return True

    def store(self, label: Label) -> None:
        """The block is there from now on."""
        self.used_s[label.digest] = self.timers.time()
        self.parents[label.digest] = label.parent
        if len(self.used_s) > FULL * self.blocks:
            for digest in by_use(self.used_s, self.parents)[: len(self.used_s) - int(FILL * self.blocks)]:
                del self.used_s[digest], self.parents[digest]
                self.evicted += 1

    def leading(self, digests: Sequence[bytes]) -> int:
        """How many of these blocks are there, from the first on."""
        return next((i for i, digest in enumerate(digests) if digest not in self.used_s), len(digests))

    def forget_all(self) -> None:
        """Forget everything."""
        self.used_s.clear()
        self.parents.clear()


class _SharedCopies(EmulatedCopies):
    """Between a pod and the folder. What is there already is not written again, and what is gone cannot be read."""

    def __init__(
        self, folder: EmulatedFolder, *, pool_blocks: int, slots: int, block_bytes: int, bytes_per_s: float
    ) -> None:
        super().__init__(
            folder.timers, pool_blocks=pool_blocks, host_slots=slots, block_bytes=block_bytes, bytes_per_s=bytes_per_s
        )
        self._folder = folder
        self.labels: dict[int, Label] = {}

    def start(self, run: BlockRun) -> RunningCopy:
        """See `CopyEngine.start`. A block can be had from the moment when its copy begins."""
        if run.direction is Direction.PROMOTE:
            if not all(self._folder.use(self.labels[pair.source]) for pair in run.pairs):
                raise CopyError("gone")
            return super().start(run)
        missing = [label for pair in run.pairs if not self._folder.use(label := self.labels[pair.target])]
        for label in missing:
            self._folder.store(label)
        if not missing:
            self._timers.call_at(self._timers.time(), self._ended)
            return _Instant()
        return super().start(run)


@dataclass(frozen=True, slots=True)
class _Instant:
    def elapsed_s(self) -> float | None:
        """See `RunningCopy.elapsed_s`: says nothing of the rate."""
        return 0.0


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
        """What the block is, or is going to be."""
        self.copies.labels[block] = label

    def size(self) -> SharedSize:
        """What it holds."""
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
    """A pod's side of the folder; `pool_blocks`: of the tier above it; `bytes_per_s`: of this pod, each way;
    `lookup_s`: seconds that a question takes."""
    copies = _SharedCopies(
        folder, pool_blocks=pool_blocks, slots=folder.blocks, block_bytes=block_bytes, bytes_per_s=bytes_per_s
    )
    copier = BlockCopier(copies, folder.timers.time, LIMITS)
    for direction in Direction:
        copier.learn_rate(direction, int(bytes_per_s), 1.0)
    side = _Side(folder, copies, _Lookups(folder, lookup_s))
    return Store(Place.SHARED, folder.blocks, block_bytes, copier, copies, shared=side)
