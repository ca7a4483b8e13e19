"""A shared folder as a dictionary, and copies to and from it: the test decides when each run ends, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cache.prefix_cache import PrefixCache
from engine.tiers.copies.base import BlockRun, Direction
from engine.tiers.stores.block_file import Label
from engine.tiers.stores.stats import SharedSize
from tests.engine.tiers.slot_copies import BLOCK_BYTES, Flying, FlyingJob, Memory


@dataclass
class FolderModel:
    """Block contents by digest. `parents`: the block that each block needs."""

    contents: dict[bytes, list[Any]] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)

    def store(self, label: Label, content: list[Any]) -> None:
        """Store a block whole or not at all; a present block stays as it is."""
        if label.digest in self.contents:
            assert self.contents[label.digest] == content, "one digest has two contents"
        self.contents.setdefault(label.digest, list(content))
        self.parents[label.digest] = label.parent

    def remove(self, digest: bytes) -> None:
        """Remove a block like an engine that makes room, after all blocks that need it."""
        for child in [child for child, parent in self.parents.items() if parent == digest]:
            self.remove(child)
        del self.contents[digest], self.parents[digest]

    def leading(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of these are in the folder."""
        return next((i for i, digest in enumerate(digests) if digest not in self.contents), len(digests))

    def clear(self) -> None:
        self.contents.clear()
        self.parents.clear()


@dataclass(eq=False)
class FolderFlying(Flying):
    """A run to or from the folder, with the labels that its blocks had when it began."""

    labels: list[Label] = field(default_factory=list)
    resets: int = 0


@dataclass
class FolderCopies:
    """One engine's copies: runs in flight, and the labels that the engine gave for the slots."""

    upper: Memory
    folder: FolderModel
    upper_cache: PrefixCache
    lower_cache: PrefixCache
    block_bytes: int = BLOCK_BYTES
    flying: list[FolderFlying] = field(default_factory=list)
    labels: dict[int, Label] = field(default_factory=dict)
    resets: int = 0
    stored: int = 0
    loaded: int = 0
    gone: int = 0

    @property
    def pool_blocks(self) -> int:
        return self.upper_cache.pool.total

    @property
    def host_slots(self) -> int:
        return self.lower_cache.pool.total

    def describe(self, slot: int, label: Label) -> None:
        self.labels[slot] = label

    def start(self, job: Sequence[BlockRun]) -> FlyingJob:
        return FlyingJob([self._begin(run) for run in job])

    def _begin(self, run: BlockRun) -> FolderFlying:
        is_down = run.direction is Direction.DEMOTE
        labels = [self.labels[pair.target if is_down else pair.source] for pair in run.pairs]
        before = [self.upper[pair.source] if is_down else None for pair in run.pairs]
        flying = FolderFlying(run, before, labels=labels, resets=self.resets)
        if not is_down:
            for pair in run.pairs:
                self.upper[pair.target] = flying
        self.flying.append(flying)
        return flying

    def end(self, flying: FolderFlying, *, fails: bool = False) -> None:
        """Like `SlotCopies.end`. The folder is not fenced: other engines write to it and make room in it."""
        self.flying.remove(flying)
        is_down = flying.run.direction is Direction.DEMOTE
        caches = (self.upper_cache, self.lower_cache) if is_down else (self.lower_cache, self.upper_cache)
        for pair, before, label in zip(flying.run.pairs, flying.before, flying.labels, strict=True):
            assert caches[0].pool.references(pair.source), "a source was freed during its copy"
            assert caches[1].pool.references(pair.target), "a target was freed during its copy"
            if is_down:
                assert self.upper[pair.source] is before, "a source was written during its copy"
                if flying.resets != self.resets:
                    fails = True  # the copy was requested before a reset
                elif not fails:
                    self.stored += label.digest not in self.folder.contents
                    self.folder.store(label, before)
                continue
            assert self.upper[pair.target] is flying, "a target was written during its copy"
            content = self.folder.contents.get(label.digest)
            if content is None or fails:
                self.gone += content is None
                fails = True
            else:
                self.loaded += 1
                self.upper[pair.target] = list(content)
        flying.has_ended, flying.fails = True, fails

    def end_all(self) -> None:
        while self.flying:
            self.end(self.flying[0])


@dataclass(eq=False)
class Asked:
    """A look-up that is answered when the test says so."""

    folder: FolderModel
    digests: Sequence[bytes]
    answer: int | None = None
    is_cancelled: bool = False

    def found(self) -> int | None:
        return self.answer

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class FolderSide:
    """An engine's side of the folder except its copies (`engine.tiers.tiers.Shared`), with the look-ups in progress."""

    folder: FolderModel
    copies: FolderCopies
    open: list[Asked] = field(default_factory=list)
    refuses: bool = False

    @property
    def lookups(self) -> FolderSide:
        return self

    def ask(self, digests: Sequence[bytes], parent: bytes) -> Asked | None:
        if self.refuses:
            return None
        self.open.append(Asked(self.folder, digests))
        return self.open[-1]

    def answer_all(self) -> None:
        for asked in self.open:
            asked.answer = self.folder.leading(asked.digests)
        self.open.clear()

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """Do nothing, because no thread waits."""

    def size(self) -> SharedSize:
        return SharedSize(0, len(self.folder.contents) * BLOCK_BYTES, {})

    def reset(self) -> None:
        self.copies.resets += 1
        self.folder.clear()
