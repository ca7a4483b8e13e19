"""The file of the disk tier: whole blocks are read back, and damaged blocks are treated as missing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from engine.cache.hashing import chain_digest, root_digest, token_bytes
from engine.cache.prefix_cache import PrefixCache
from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from engine.sched.request import KeySpan
from engine.tiers.copies.base import BlockRun, CopyError, Direction
from engine.tiers.link import labels
from engine.tiers.stores.block_file import (
    HEAD_BYTES,
    LABEL_BYTES,
    NO_DIGEST,
    BlockDamaged,
    BlockFile,
    FileMedium,
    Label,
    Shape,
    open_file,
)
from engine.tiers.stores.disk import SUFFIX, DiskCopies, OpenDisk, open_disk
from tests.engine.cache.integrity import check_integrity

SLOTS, BLOCK_BYTES, BLOCK_SIZE = 6, 64, 4
SHAPE = Shape(SLOTS, BLOCK_BYTES, BLOCK_SIZE, b"f" * 32)


def kv_of(digest: bytes) -> bytes:
    """Return KV that only a block of this digest has."""
    return b"".join(xxh3_128_digest(digest + bytes([i])) for i in range(BLOCK_BYTES // 16))


def label(number: int, parent: bytes = NO_DIGEST, keys: tuple[PrefixKey, ...] = ()) -> Label:
    content = token_bytes([number] * BLOCK_SIZE)
    return Label(chain_digest(root_digest(b"") if parent == NO_DIGEST else parent, content), parent, content, keys)


@contextmanager
def opened(path: Path, shape: Shape = SHAPE) -> Iterator[tuple[BlockFile, bool]]:
    file, descriptor, is_foreign = open_file(path, shape)
    try:
        yield file, is_foreign
    finally:
        os.close(descriptor)


def write(file: BlockFile, slot: int, what: Label) -> None:
    file.write(slot, what, memoryview(kv_of(what.digest)))


def read(file: BlockFile, slot: int, digest: bytes) -> bytes:
    kv = bytearray(file.shape.block_bytes)
    file.read(slot, digest, memoryview(kv))
    return bytes(kv)


def test_what_is_written_is_found_after_a_restart(tmp_path: Path) -> None:
    written = [label(i, keys=(PrefixKey(i), PrefixKey(2**64 - 1))) for i in range(SLOTS - 1)]
    with opened(tmp_path / "file") as (file, _):
        for slot, what in enumerate(written):
            write(file, slot, what)
    with opened(tmp_path / "file") as (file, is_foreign):
        assert not is_foreign
        found = dict(file.labels())
        assert [(found[i].digest, found[i].content, found[i].keys) for i in range(SLOTS - 1)] == [
            (what.digest, what.content, what.keys) for what in written
        ]
        assert SLOTS - 1 not in found
        for slot, what in enumerate(written):
            assert read(file, slot, what.digest) == kv_of(what.digest)


@settings(phases=(Phase.generate, Phase.shrink), max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_flipped_bit_or_torn_end_is_a_miss(tmp_path: Path, data: st.DataObject) -> None:
    """The other blocks are still there."""
    path, written = tmp_path / "file", [label(i) for i in range(SLOTS)]
    path.unlink(missing_ok=True)
    with opened(path) as (file, _):
        for slot, what in enumerate(written):
            write(file, slot, what)
    before = path.read_bytes()
    content = bytearray(before)
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    else:
        torn = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(torn, len(content)))
        content[torn:end] = bytes(end - torn)
    path.write_bytes(content)
    with opened(path) as (file, is_foreign):
        assert is_foreign == (content[:HEAD_BYTES] != before[:HEAD_BYTES])
        for slot, what in enumerate(written):
            start = HEAD_BYTES + slot * (LABEL_BYTES + BLOCK_BYTES)
            place = slice(start, start + LABEL_BYTES + BLOCK_BYTES)
            if not is_foreign and content[place] == before[place]:
                assert read(file, slot, what.digest) == kv_of(what.digest)
            else:
                with pytest.raises(BlockDamaged):
                    read(file, slot, what.digest)


def test_another_block_in_the_slot_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path / "file") as (file, _):
        write(file, 0, label(1))
        with pytest.raises(BlockDamaged, match="does not hold"):
            read(file, 0, label(2).digest)
        file.write(1, label(2), memoryview(kv_of(label(2).digest)))
        raw = bytearray((tmp_path / "file").read_bytes())
        stride = LABEL_BYTES + BLOCK_BYTES
        kv = [HEAD_BYTES + slot * stride + LABEL_BYTES for slot in (0, 1)]
        raw[kv[0] : kv[0] + BLOCK_BYTES] = raw[kv[1] : kv[1] + BLOCK_BYTES]
        (tmp_path / "file").write_bytes(raw)
        with pytest.raises(BlockDamaged, match="wrong checksum"):
            read(file, 0, label(1).digest)


@pytest.mark.parametrize(
    "other",
    [
        Shape(SLOTS, BLOCK_BYTES, BLOCK_SIZE, b"g" * 32),
        Shape(SLOTS, BLOCK_BYTES * 2, BLOCK_SIZE, b"f" * 32),
        Shape(SLOTS, BLOCK_BYTES, BLOCK_SIZE * 2, b"f" * 32),
        Shape(SLOTS - 1, BLOCK_BYTES, BLOCK_SIZE, b"f" * 32),
    ],
    ids=["model", "bytes", "tokens", "slots"],
)
def test_a_file_of_another_engine_is_not_read(tmp_path: Path, other: Shape) -> None:
    with opened(tmp_path / "file") as (file, _):
        write(file, 0, label(1))
    with opened(tmp_path / "file", other) as (file, is_foreign):
        assert is_foreign
        assert not list(file.labels())
    assert (tmp_path / "file").stat().st_size == BlockFile.bytes_for(other)


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    with opened(tmp_path / "file"), pytest.raises(BlockingIOError):
        open_file(tmp_path / "file", SHAPE)


def test_files_of_other_models_make_room(tmp_path: Path) -> None:
    stale = tmp_path / f"abc{SUFFIX}"
    stale.write_bytes(b"x" * 1000)
    (tmp_path / "notes.txt").write_text("mine")
    disk = open_disk(tmp_path, SHAPE, memoryview(bytearray(BLOCK_BYTES)))
    disk.close()
    assert disk.discarded_files == 1
    assert not stale.exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_file_that_an_engine_of_another_model_uses_is_not_removed(tmp_path: Path) -> None:
    memory, other = memoryview(bytearray(BLOCK_BYTES)), Shape(SLOTS, BLOCK_BYTES, BLOCK_SIZE, b"o" * 32)
    running = open_disk(tmp_path, SHAPE, memory)
    with pytest.raises(BlockingIOError):
        open_disk(tmp_path, other, memory)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1
    running.close()
    successor = open_disk(tmp_path, other, memory)
    successor.close()
    assert successor.discarded_files == 1
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"base_s": "x"}',
        b"\xff",
        b'{"base_s": NaN}',
        b'{"base_s": 1%0400d}' % 0,
        b"[" * 10**5,
        None,
    ],
)
def test_a_cost_that_makes_no_sense_is_not_known(tmp_path: Path, content: bytes | None) -> None:
    disk = open_disk(tmp_path, SHAPE, memoryview(bytearray(BLOCK_BYTES)))
    left = StepCost(0.01, 1e-4, 1e-9, 1e-6, 1e-3)
    disk.write_cost(left)
    assert disk.read_cost() == left
    path = tmp_path / "step-cost.json"
    if content is None:
        path.write_text(path.read_text().replace("0.0001", "-1e300"))
    else:
        path.write_bytes(content)
    assert disk.read_cost() == StepCost()
    disk.close()


def test_a_reset_empties_the_file_and_what_was_described_before_is_not_written(tmp_path: Path) -> None:
    def reopened() -> tuple[OpenDisk, PrefixCache]:
        disk = open_disk(tmp_path, SHAPE, memory)
        index = PrefixCache(SLOTS, BLOCK_SIZE)
        disk.copies.restore(index)
        return disk, index

    old, new = label(1), label(2)
    memory = memoryview(bytearray(SLOTS * BLOCK_BYTES))
    disk, _ = reopened()
    for block in (0, 1):
        memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = kv_of(old.digest)
        disk.copies.describe(block, old)
    disk.copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1))
    disk.copies.reset()
    with pytest.raises(CopyError, match="reset"):
        disk.copies.move(BlockRun(Direction.DEMOTE, 1, 1, 1))
    with pytest.raises(CopyError, match="nothing is known"):
        disk.copies.move(BlockRun(Direction.PROMOTE, 0, 0, 1))
    disk.copies.describe(2, new)
    disk.copies.move(BlockRun(Direction.DEMOTE, 2, 2, 1))
    disk.copies.finish_resets()
    disk.close()
    disk, index = reopened()
    assert index.has(new.digest)
    assert index.indexed_blocks == 1
    disk.copies.reset()
    disk.close()
    disk, index = reopened()
    assert index.indexed_blocks == 0
    disk.close()


class FaultyMedium(FileMedium):
    """A disk on which the operations that a test names fail."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.fault: int | None = None
        self.writes_left = 10**9

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self.fault is not None:
            raise OSError(self.fault, os.strerror(self.fault))
        return super().read_into(buffer, offset)

    def write(self, buffer: memoryview | bytes, offset: int) -> None:
        if self.fault is not None:
            raise OSError(self.fault, os.strerror(self.fault))
        view = memoryview(buffer)
        count = min(len(view), self.writes_left)
        self.writes_left -= count
        super().write(view[:count], offset)
        if count < len(view):
            raise OSError(errno.ENOSPC, "No space left on device")

    def resize(self, size: int) -> None:
        if self.fault is not None:
            raise OSError(self.fault, os.strerror(self.fault))
        super().resize(size)


def test_a_copy_that_hangs_beyond_the_end_writes_into_no_other_file(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, SHAPE, memoryview(bytearray(BLOCK_BYTES)))
    disk.copies.describe(0, label(1))
    disk.close()
    with (tmp_path / "other").open("w+b") as other:  # gets the number of the file that was closed
        for way in Direction:
            with pytest.raises(CopyError, match="Bad file descriptor"):
                disk.copies.move(BlockRun(way, 0, 0, 1))
        other.seek(0)
        assert other.read() == b""


def test_a_file_that_cannot_be_emptied_is_not_written(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, SHAPE, memoryview(bytearray(BLOCK_BYTES)))
    file = disk.copies._file
    medium = file._medium = FaultyMedium(file._medium._descriptor)  # type: ignore[attr-defined]
    medium.fault = errno.EIO
    disk.copies.reset()
    disk.copies.describe(0, label(1))
    with pytest.raises(CopyError, match="Input/output"):
        disk.copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1))
    medium.fault = None
    disk.copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1))
    assert len(list(file.labels())) == 1
    disk.close()


@pytest.mark.parametrize("room", [0, 10, BLOCK_BYTES, BLOCK_BYTES + 100, BLOCK_BYTES + LABEL_BYTES - 1])
def test_a_write_cut_short_by_a_full_disk_leaves_nothing(tmp_path: Path, room: int) -> None:
    with opened(tmp_path / "file") as (whole, _):
        write(whole, 0, label(1))
        medium = FaultyMedium(whole._medium._descriptor)  # type: ignore[attr-defined]
        file = BlockFile(medium, SHAPE)
        medium.writes_left = room
        with pytest.raises(OSError, match="No space"):
            write(file, 0, label(2))
        with pytest.raises(BlockDamaged):
            read(whole, 0, label(2).digest)
        if room:
            with pytest.raises(BlockDamaged):
                read(whole, 0, label(1).digest)
        else:
            assert read(whole, 0, label(1).digest) == kv_of(label(1).digest)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_a_broken_disk_fails_the_copy_alone(tmp_path: Path, fault: int) -> None:
    with opened(tmp_path / "file") as (whole, _):
        medium = FaultyMedium(whole._medium._descriptor)  # type: ignore[attr-defined]
        copies = DiskCopies(BlockFile(medium, SHAPE), memoryview(bytearray(2 * BLOCK_BYTES)))
        copies.describe(0, label(1))
        copies.move(BlockRun(Direction.DEMOTE, 0, 0, 1))
        medium.fault = fault
        for direction in Direction:
            with pytest.raises(CopyError):
                copies.move(BlockRun(direction, 0, 0, 1))
        assert not list(BlockFile(medium, SHAPE).labels())
        medium.fault = None
        copies.move(BlockRun(Direction.PROMOTE, 0, 1, 1))


def filled(copies: DiskCopies, index: PrefixCache, memory: memoryview, tokens: list[int], salt: str = "") -> None:
    """Store the blocks of a prompt as the tiers do."""
    spans = [KeySpan(PrefixKey(hash(tuple(tokens[:n])) & 2**63 - 1), n) for n in range(4, len(tokens) + 1, 4)]
    sequence = index.open(tokens, salt, spans)
    present = index.hold(sequence, len(sequence.digests))
    assert present is not None
    for i, what in enumerate(labels(sequence)):
        if i >= present:
            memory[:BLOCK_BYTES] = kv_of(what.digest)
            copies.describe(sequence.blocks[i], what)
            copies.move(BlockRun(Direction.DEMOTE, 0, sequence.blocks[i], 1))
    index.commit(sequence, len(tokens))
    index.release(sequence)


def readable(copies: DiskCopies, index: PrefixCache, memory: memoryview, tokens: list[int], salt: str = "") -> int:
    """Return how many leading blocks of a prompt the tier holds; read each one and check that it is right."""
    sequence = index.open(tokens, salt)
    for i, block in enumerate(index.find(sequence, len(sequence.digests))):
        copies.move(BlockRun(Direction.PROMOTE, block, 1, 1))
        assert bytes(memory[BLOCK_BYTES : 2 * BLOCK_BYTES]) == kv_of(sequence.digests[i])
    return len(index.find(sequence, len(sequence.digests)))


RED = "the salt of the tenant red"


def test_a_restart_finds_chains_keys_and_tenants(tmp_path: Path) -> None:
    """Block numbers may change: the second engine numbers its blocks anew and continues to write into free slots."""
    long, branch, tenants = [1] * 12, [1] * 8 + [2] * 4, [1] * 8
    shape = Shape(8, BLOCK_BYTES, BLOCK_SIZE, b"f" * 32)
    memory = memoryview(bytearray(2 * BLOCK_BYTES))
    disk = open_disk(tmp_path, shape, memory)
    index = PrefixCache(8, BLOCK_SIZE)
    for tokens, salt in ((tenants, RED), (long, ""), (branch, "")):
        filled(disk.copies, index, memory, tokens, salt)
    keys = index.held_keys()[0]
    disk.close()
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    assert RED.encode() not in file.read_bytes()
    for _ in range(3):
        disk = open_disk(tmp_path, shape, memory)
        index = PrefixCache(8, BLOCK_SIZE)
        assert disk.copies.restore(index) == 6
        check_integrity(index)
        assert set(index.held_keys()[0]) == set(keys)
        found = [readable(disk.copies, index, memory, tokens) for tokens in (long, branch, [3] * 8)]
        assert found == [3, 3, 0]
        assert readable(disk.copies, index, memory, tenants, RED) == 2
        assert readable(disk.copies, index, memory, tenants, "blue") == 0
        disk.close()
    disk = open_disk(tmp_path, shape, memory)
    index = PrefixCache(8, BLOCK_SIZE)
    disk.copies.restore(index)
    filled(disk.copies, index, memory, [7] * 16)
    assert readable(disk.copies, index, memory, [7] * 16) == 4
    readable(disk.copies, index, memory, long)
    disk.close()


def test_a_chain_with_a_gap_is_found_up_to_the_gap(tmp_path: Path) -> None:
    memory = memoryview(bytearray(2 * BLOCK_BYTES))
    disk = open_disk(tmp_path, SHAPE, memory)
    filled(disk.copies, PrefixCache(SLOTS, BLOCK_SIZE), memory, [1] * 16)
    path = next(tmp_path.glob(f"*{SUFFIX}"))
    content = bytearray(path.read_bytes())
    content[HEAD_BYTES + 2 * (LABEL_BYTES + BLOCK_BYTES)] ^= 1
    path.write_bytes(content)
    disk.close()
    disk = open_disk(tmp_path, SHAPE, memory)
    index = PrefixCache(SLOTS, BLOCK_SIZE)
    assert disk.copies.restore(index) == 2
    assert readable(disk.copies, index, memory, [1] * 16) == 2
    disk.close()


_WRITER = """
import sys
from pathlib import Path
from engine.tiers.stores.block_file import NO_DIGEST, Label, Shape, open_file
slots, block_bytes = int(sys.argv[2]), int(sys.argv[3])
file, _, _ = open_file(Path(sys.argv[1]), Shape(slots, block_bytes, 4, b"f" * 32))
number = 0
while True:
    digest = bytes([number % 251]) * 32
    file.write(number % slots, Label(digest, NO_DIGEST, b"tokens"), memoryview(digest * (block_bytes // 32)))
    number += 1
    if number % 20 == 0:
        print(number, flush=True)
"""


def test_kill_9_in_the_middle_of_writes_loses_no_more_than_the_last_block(tmp_path: Path) -> None:
    """Blocks have 64 KiB, so that the process mostly dies during a write."""
    shape = Shape(SLOTS, 2**16, BLOCK_SIZE, b"f" * 32)
    for rounds in (1, 2):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path / "file"), str(SLOTS), str(2**16)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        with writer, writer.stdout:
            for _ in range(rounds):
                assert writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        with opened(tmp_path / "file", shape) as (file, is_foreign):
            assert not is_foreign
            whole = 0
            for slot, what in file.labels():
                try:
                    assert read(file, slot, what.digest) == what.digest * (2**16 // 32)
                    whole += 1
                except BlockDamaged:
                    pass
            assert whole >= SLOTS - 1
