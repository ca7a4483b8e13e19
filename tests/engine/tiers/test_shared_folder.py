"""A folder of blocks that several engines share: whatever happens to it, a block is either whole or a miss."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.tiers.copies.base import BlockRun, CopyError, Direction
from engine.tiers.stores.block_file import NO_DIGEST, Label
from engine.tiers.stores.janitor import FILL, FULL, LEASE_S, TEMPORARY_S, Janitor
from engine.tiers.stores.shared import SWEEP_SHARE, HostBlocks, OpenShared, SharedCopies
from engine.tiers.stores.shared_folder import HEAD_BYTES, Event, SharedFolder

BLOCK_BYTES, CHAINS, DEPTH = 256, 3, 6
FILE_BYTES = HEAD_BYTES + BLOCK_BYTES
OLD_S = 10_000.0


def chain(number: int, salt: str = "") -> list[Label]:
    """Return the blocks of a prompt; all chains share their first block."""
    found, parent = [], NO_DIGEST
    for depth in range(DEPTH):
        content = f"{salt}|{number if depth else 0}|{depth}".encode()
        digest = sha256(parent + content).digest()
        found.append(Label(digest, parent, content))
        parent = digest
    return found


CHAIN = [chain(number) for number in range(CHAINS)]


def kv_of(label: Label) -> bytes:
    return label.digest * (BLOCK_BYTES // 32)


def opened(root: Path, writer: str = "a", fingerprint: bytes = b"f" * 32) -> SharedFolder:
    folder = SharedFolder(root, fingerprint=fingerprint, block_size=4, block_bytes=BLOCK_BYTES, writer=writer)
    folder.open()
    return folder


def store(folder: SharedFolder, label: Label) -> bool:
    return folder.store(label, memoryview(kv_of(label)))


def load(folder: SharedFolder, label: Label) -> bytes:
    kv = bytearray(BLOCK_BYTES)
    folder.load(label, memoryview(kv))
    return bytes(kv)


def leading(folder: SharedFolder, labels: list[Label]) -> int:
    return folder.leading([label.digest for label in labels], labels[0].parent)


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*-*") if path.is_file() and len(path.parent.name) == 2]


class Sharing(RuleBasedStateMachine):
    """Three engines and what happens to their files, compared with a dictionary."""

    @initialize(room=st.integers(2, 20))
    def start(self, room: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.root = Path(self.temporary.name)
        self.engines = [opened(self.root, name) for name in "abc"]
        self.max_bytes = room * FILE_BYTES
        self.there: dict[bytes, Label] = {}
        self.now_s = 0.0

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            self.temporary.cleanup()

    @rule(who=st.integers(0, 2), number=st.integers(0, CHAINS - 1), depth=st.integers(1, DEPTH))
    def keep(self, who: int, number: int, depth: int) -> None:
        """Store a request's first `depth` blocks."""
        self.now_s += 1
        for label in CHAIN[number][:depth]:
            assert store(self.engines[who], label) == (label.digest not in self.there)
            self.there[label.digest] = label
            os.utime(self.engines[who]._path(label.digest, label.parent), (self.now_s, self.now_s))

    @rule(who=st.integers(0, 2), number=st.integers(0, CHAINS - 1), depth=st.integers(0, DEPTH - 1))
    def read(self, who: int, number: int, depth: int) -> None:
        label = CHAIN[number][depth]
        try:
            assert load(self.engines[who], label) == kv_of(label)
            assert label.digest in self.there
        except OSError:
            assert label.digest not in self.there

    @rule(number=st.integers(0, CHAINS - 1), depth=st.integers(0, DEPTH - 1), at=st.integers(0, FILE_BYTES - 1))
    def flip(self, number: int, depth: int, at: int) -> None:
        """Flip one bit of a file. Reading finds the damage and removes the file. Then remove blocks that need it."""
        label = CHAIN[number][depth]
        if label.digest in self.there:
            path = self.engines[0]._path(label.digest, label.parent)
            content = bytearray(path.read_bytes())
            content[at] ^= 8
            path.write_bytes(content)
            with pytest.raises(OSError, match="not the block"):
                load(self.engines[1], label)
            assert not path.exists()
            del self.there[label.digest]
            for one in CHAIN:
                for later in one[depth + 1 :]:
                    if label in one and self.there.pop(later.digest, False):
                        self.engines[0]._path(later.digest, later.parent).unlink()

    @rule(who=st.integers(0, 2))
    def sweep(self, who: int) -> None:
        before = len(self.there)
        swept = Janitor(self.root, self.max_bytes, self.engines[who].writer).sweep()
        assert swept is not None
        left = {path.name[:64] for path in files(self.root)}
        self.there = {digest: label for digest, label in self.there.items() if digest.hex() in left}
        assert swept.evicted == before - len(self.there)
        assert swept.held_bytes == len(self.there) * FILE_BYTES <= FULL * self.max_bytes
        if swept.evicted:
            assert (len(self.there) + 1) * FILE_BYTES > FILL * self.max_bytes

    @rule(who=st.integers(0, 2))
    def reset(self, who: int) -> None:
        self.engines[who].forget_all()
        self.there.clear()

    @invariant()
    def whoever_looks_finds_what_is_there(self) -> None:
        for labels in CHAIN if hasattr(self, "there") else ():
            expected = next((i for i, label in enumerate(labels) if label.digest not in self.there), DEPTH)
            assert all(label.digest not in self.there for label in labels[expected:]), "a block lacks its parent"
            assert leading(self.engines[2], labels) == expected


def test_engines_share_what_is_whole() -> None:
    run_state_machine_as_test(
        Sharing,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        ),
    )


def test_room_is_made_by_use_and_a_block_goes_before_its_parent(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for age, labels in enumerate(CHAIN):
        for label in labels:
            store(folder, label)
            os.utime(folder._path(label.digest, label.parent), (1000.0 - age, 1000.0 - age))
    os.utime(folder._path(CHAIN[1][0].digest, NO_DIGEST), (0.0, 0.0))  # the shared first block is the oldest
    whole = 1 + CHAINS * (DEPTH - 1)
    for room in range(whole, 0, -1):
        assert Janitor(tmp_path, room * FILE_BYTES, "a").sweep() is not None
        found = [leading(folder, labels) for labels in CHAIN]
        assert sum(found) - (CHAINS - 1) * (found[0] > 0) == len(files(tmp_path))
        assert found == sorted(found, reverse=True), "the least recently used chains are removed first"


@pytest.mark.parametrize("cut", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_torn_file_is_a_miss_and_is_written_anew(tmp_path: Path, cut: int) -> None:
    folder, label = opened(tmp_path), CHAIN[0][0]
    store(folder, label)
    path = folder._path(label.digest, label.parent)
    path.write_bytes((path.read_bytes() + b"x")[:cut])
    other = opened(tmp_path, "b")
    with pytest.raises(OSError, match="not the block"):
        load(other, label)
    assert other.events == {Event.DAMAGED: 1}
    assert store(other, label)
    assert load(folder, label) == kv_of(label)


def test_blocks_of_another_model_version_tenant_or_content_are_not_served(tmp_path: Path) -> None:
    mine, label = opened(tmp_path), CHAIN[0][0]
    store(mine, label)
    other = opened(tmp_path, "b", b"g" * 32)
    assert not leading(other, CHAIN[0])
    assert not leading(mine, chain(0, "tenant"))
    moved = other._path(label.digest, label.parent)
    moved.parent.mkdir()
    mine._path(label.digest, label.parent).rename(moved)
    with pytest.raises(OSError, match="not the block"):  # even if the file is in the other model's place
        load(other, label)
    store(mine, label)
    with pytest.raises(OSError, match="not the block"):  # digests that collide
        load(mine, Label(label.digest, label.parent, b"other tokens"))


def test_a_file_that_is_used_says_so(tmp_path: Path) -> None:
    folder, label = opened(tmp_path), CHAIN[0][0]
    store(folder, label)
    path = folder._path(label.digest, label.parent)
    for use in (lambda: load(folder, label), lambda: store(folder, label)):
        os.utime(path, (1.0, 1.0))
        use()
        assert path.stat().st_mtime > 1.0


def test_what_cannot_be_removed_keeps_no_other_file_in_the_folder(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for what in CHAIN[0]:
        store(folder, what)
    stuck = folder._path(sha256(b"stuck").digest(), NO_DIGEST)
    stuck.mkdir(parents=True)
    os.utime(stuck, (1.0, 1.0))  # it would go first
    swept = Janitor(tmp_path, 3 * FILE_BYTES, "a").sweep()
    assert swept is not None
    assert swept.evicted >= DEPTH - 2
    assert stuck.exists()
    assert swept.held_bytes == sum(path.stat().st_size for path in (*files(tmp_path), stuck))


@pytest.mark.parametrize("late_s", [LEASE_S + 60, -10 * OLD_S])
def test_one_engine_at_a_time_makes_room_and_a_dead_ones_turn_ends(tmp_path: Path, late_s: float) -> None:
    """`late_s`: how old the lock is. It is of the future if the clock was set back since."""
    opened(tmp_path)
    janitors = [Janitor(tmp_path, 10**6, name) for name in "ab"]
    assert janitors[0]._take_turn()
    assert janitors[1].sweep() is None
    lock = tmp_path / "janitor.lock"
    made_s = time.time() - late_s
    os.utime(lock, (made_s, made_s))
    assert janitors[1].sweep() is not None
    assert not lock.exists()
    assert janitors[1]._take_turn()
    janitors[0]._end_turn()
    assert lock.exists(), "an engine does not end another engine's turn"


@pytest.mark.parametrize("late_s", [TEMPORARY_S + 60, -10 * OLD_S])
def test_files_that_were_begun_and_never_ended_go_and_new_ones_stay(tmp_path: Path, late_s: float) -> None:
    folder = opened(tmp_path)
    dead, alive = (folder.path / "tmp" / name for name in ("dead-1", "alive-1"))
    for path in (dead, alive):
        path.write_bytes(b"half")
    made_s = time.time() - late_s
    os.utime(dead, (made_s, made_s))
    swept = Janitor(tmp_path, 10**6, "a").sweep()
    assert swept is not None
    assert (swept.abandoned, swept.held_bytes) == (1, 0)
    assert not dead.exists()
    assert alive.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "write", "close", "preadv", "rename"])
def test_a_broken_file_system_is_a_miss_and_a_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    folder = opened(tmp_path)
    memory = memoryview(bytearray(2 * BLOCK_BYTES))
    copies = SharedCopies(folder, HostBlocks(memory, BLOCK_BYTES), 2)
    copies.room_bytes = 10 * FILE_BYTES
    label = CHAIN[0][0]
    memory[:BLOCK_BYTES] = kv_of(label)
    copies.describe(0, label)
    way = Direction.PROMOTE if call == "preadv" else Direction.DEMOTE
    if call == "preadv":
        store(folder, label)
    before = dict(folder.events)

    with monkeypatch.context() as patch:
        if call == "rename":
            patch.setattr(Path, "rename", failing(code))
        else:
            patch.setattr(os, call, failing(code, getattr(os, call) if call == "close" else None))
        with pytest.raises(CopyError):
            copies.move(BlockRun(way, 0, 0, 1))
    assert sum(folder.events.values()) == sum(before.values()) + 1
    assert folder.events[Event.FULL] == (code in (errno.ENOSPC, errno.EDQUOT) and way is Direction.DEMOTE)
    if way is Direction.DEMOTE:
        assert not files(tmp_path)
        if call != "open":
            assert not list((folder.path / "tmp").iterdir())
    copies.move(BlockRun(way, 0, 0, 1))
    assert load(folder, label) == kv_of(label)


def failing(code: int, first: Any = None) -> Any:
    """Return a call that fails; if `first` is given, the call runs it before."""

    def fail(*args: Any, **named: Any) -> Any:
        if first is not None:
            first(*args, **named)
        raise OSError(code, os.strerror(code))

    return fail


def test_nothing_is_written_beyond_the_bytes_that_the_folder_may_hold(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    copies = SharedCopies(folder, HostBlocks(memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES), DEPTH)
    copies.room_bytes = 2 * FILE_BYTES + 1
    asked = []
    copies.on_written = lambda: asked.append(True)
    for block, label in enumerate(CHAIN[0]):
        copies.describe(block, label)
        with suppress(CopyError):
            copies.move(BlockRun(Direction.DEMOTE, 0, block, 1))
    assert len(files(tmp_path)) == 2
    assert len(asked) == folder.events[Event.FULL] == DEPTH - 2


@pytest.mark.parametrize("files_of_room", [1.0, 1.5, 3.2, 10.6, 18.9, 40.5])
def test_there_is_always_room_for_one_more_file_after_a_sweep(tmp_path: Path, files_of_room: float) -> None:
    """Even if the folder's limit is so low that one file is more than the share that a sweep leaves free."""
    folder = opened(tmp_path)
    copies = SharedCopies(folder, HostBlocks(memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES), 1)
    shared = OpenShared(folder, copies, int(files_of_room * FILE_BYTES))
    for number in range(50):
        shared._sweep()
        copies.describe(0, Label(sha256(b"%d" % number).digest(), NO_DIGEST, b"content"))
        copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1))
        assert len(files(tmp_path)) <= files_of_room
    shared.close()
    assert folder.events[Event.STORED] == 50


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "close"])
def test_room_is_made_on_a_disk_that_has_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Not even the engine's name can be written into the lock."""
    folder = opened(tmp_path)
    for what in CHAIN[0]:
        store(folder, what)

    def full(descriptor: int, *arguments: Any) -> int:
        if call == "close":
            is_empty = not os.fstat(descriptor).st_size
            os.ftruncate(descriptor, 0)  # what was written is lost
            real(descriptor)
            if is_empty:
                return 0
        raise OSError(code, os.strerror(code))

    real = getattr(os, call)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        swept = Janitor(tmp_path, 4 * FILE_BYTES, "a").sweep()
    assert swept is not None
    assert swept.evicted == DEPTH - 3
    assert len(files(tmp_path)) == 3
    assert not (tmp_path / "janitor.lock").exists(), "the turn has ended"


def test_a_folder_whose_lock_is_kept_does_not_grow(tmp_path: Path) -> None:
    """An engine that was killed while it made room keeps the lock for LEASE_S."""
    most = 128 * FILE_BYTES
    copies = SharedCopies(opened(tmp_path), HostBlocks(memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES), 1)
    engine = OpenShared(opened(tmp_path), copies, most)
    engine._sweep()
    copies.sweep_from_bytes, copies.on_written = SWEEP_SHARE * most, engine._sweep

    def stored(blocks: range) -> int:
        count = 0
        for number in blocks:
            engine.describe(0, Label(sha256(b"%d" % number).digest(), NO_DIGEST, b""))
            with suppress(CopyError):
                count += copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1)).blocks
        return count

    try:
        lock = tmp_path / "janitor.lock"
        lock.write_bytes(b"another engine")
        assert 120 < stored(range(400)) <= 128 * (1 + SWEEP_SHARE)
        lock.unlink()
        assert stored(range(400, 800)) > 390, "room is made again"
        assert sum(path.stat().st_size for path in files(tmp_path)) <= most
    finally:
        engine.close()


def test_what_was_on_its_way_down_before_a_reset_is_not_stored_after_it(tmp_path: Path) -> None:
    copies = SharedCopies(opened(tmp_path), HostBlocks(memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES), 1)
    copies.room_bytes = 10 * FILE_BYTES
    copies.describe(0, CHAIN[0][0])
    copies.resets += 1
    with pytest.raises(CopyError, match="reset"):
        copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1))


_WRITER = """
import sys
from hashlib import sha256
from pathlib import Path
from engine.tiers.stores.block_file import NO_DIGEST, Label
from engine.tiers.stores.shared_folder import SharedFolder
size = int(sys.argv[2])
folder = SharedFolder(Path(sys.argv[1]), fingerprint=b"f" * 32, block_size=4, block_bytes=size, writer=sys.argv[3])
folder.open()
parent, number = NO_DIGEST, 0
while True:
    content = b"%d" % number
    digest = sha256(parent + content).digest()
    folder.store(Label(digest, parent, content), memoryview(digest * (size // 32)))
    parent, number = digest, number + 1
    if number == 3:
        print(number, flush=True)
"""


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes that store the same chain, with blocks of 256 KiB."""
    command = [sys.executable, "-c", _WRITER, str(tmp_path), str(2**18)]
    started = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("x", "y")]
    yield started
    for writer in started:
        writer.kill()
        with writer:
            pass


def test_kill_9_leaves_whole_blocks_and_temporary_files(tmp_path: Path, writers: list[subprocess.Popen[str]]) -> None:
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline()
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    folder = SharedFolder(tmp_path, fingerprint=b"f" * 32, block_size=4, block_bytes=2**18, writer="z")
    kv, parent, number = bytearray(2**18), NO_DIGEST, 0
    while True:
        content = b"%d" % number
        label = Label(sha256(parent + content).digest(), parent, content)
        try:
            folder.load(label, memoryview(kv))
        except FileNotFoundError:
            break
        assert kv == label.digest * (2**18 // 32)
        parent, number = label.digest, number + 1
    assert number >= 3
    assert folder.events[Event.DAMAGED] == 0
    late_s = time.time() - TEMPORARY_S - 60
    for left in (folder.path / "tmp").iterdir():
        os.utime(left, (late_s, late_s))
    assert Janitor(tmp_path, 10**12, "z").sweep() is not None
    assert not list((folder.path / "tmp").iterdir())
    assert len(files(tmp_path)) == number
