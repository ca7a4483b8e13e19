"""A folder of KV blocks that several engines share: a file for each block, named by what it holds.

    <root>/<generation>/<two digits of the digest>/<digest>-<start of the parent's digest>   a block
    <root>/<generation>/tmp/<writer>-<number>                                                one that is being written

    file: magic, format, tokens a block, bytes a block, fingerprint, digest, parent's digest, xxh3_128 of content,
          xxh3_128 of digest and KV, xxh3_64 of all before, then the block's KV

A generation is a fingerprint and a format. The digest covers all tokens up to the block's end and their `cache_salt`.
So equal names mean equal KV, and writing a file that is there already changes nothing. A file is written under another
name, closed, and renamed. The checksums detect what a kill, a full disk or a crash of the file server has damaged, so
nothing is ever synced, and nothing is locked.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import count
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from engine.tiers.stores.block_file import Label

FORMAT = 1
_HEAD = struct.Struct("<8sIIQ32s32s32s16s16s")
_SUM_BYTES = 8
HEAD_BYTES = _HEAD.size + _SUM_BYTES
_MAGIC = b"WARMKVS\0"
TOUCH_S = 300.0
"""Least seconds between touches of a used file. A touch sets the modification time: access times are not reliable."""
TEMPORARY = "tmp"
PARENT_DIGITS = 16
"""Digits of a parent's digest in a file's name. They show the janitor which files are of no use without others."""


class Event(StrEnum):
    """What has happened to files."""

    STORED = "stored"
    PRESENT = "present"
    """A file that was to be stored and was there already."""
    LOADED = "loaded"
    GONE = "gone"
    """A file that was to be loaded and was not there any more."""
    DAMAGED = "damaged"
    """A file that was torn, had flipped bits, or was another engine's, and was removed."""
    FAILED = "failed"
    """The file system raised an error."""
    FULL = "full"
    """A file that was not stored for lack of room."""
    EVICTED = "evicted"
    ABANDONED = "abandoned"
    """A file that a writer had begun but never finished, and that was removed."""


class SharedFolder:
    """One generation's blocks in a folder. Every call may take as long as the file system takes, and may raise OSError.
    Several threads may call; other processes use the folder at the same time and know nothing of each other."""

    def __init__(self, root: Path, *, fingerprint: bytes, block_size: int, block_bytes: int, writer: str) -> None:
        """`writer`: a name that no other engine has."""
        self.root = root
        self.fingerprint, self.block_size, self.block_bytes = fingerprint, block_size, block_bytes
        self.path = root / f"{fingerprint[:16].hex()}-{FORMAT}"
        self.writer = writer
        self.file_bytes = HEAD_BYTES + block_bytes
        self.events: Counter[Event] = Counter()
        self._numbers = count(1)
        self._made: set[str] = set()

    def open(self) -> None:
        """Create the folder if it does not exist."""
        (self.path / TEMPORARY).mkdir(mode=0o700, parents=True, exist_ok=True)

    def store(self, label: Label, kv: memoryview) -> bool:
        """Store a block, whole or not at all; return False if it was there already."""
        path = self._path(label.digest, label.parent)
        try:
            if self._is_there(path):
                self.events[Event.PRESENT] += 1
                return False
            self._write(path, self._head(label, kv), kv)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self.events[Event.FULL if full else Event.FAILED] += 1
            raise
        self.events[Event.STORED] += 1
        return True

    def load(self, label: Label, kv: memoryview) -> None:
        """Fill `kv` with a block. Raises OSError if its file is missing or damaged; a damaged file is removed."""
        path = self._path(label.digest, label.parent)
        head = bytearray(HEAD_BYTES)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.events[Event.GONE] += 1
            raise
        except OSError:
            self.events[Event.FAILED] += 1
            raise
        try:
            done = _read(descriptor, [memoryview(head), kv])
            is_old = abs(time.time() - os.fstat(descriptor).st_mtime) > TOUCH_S
        except OSError:
            self.events[Event.FAILED] += 1
            raise
        finally:
            os.close(descriptor)
        if done != self.file_bytes or bytes(head) != self._head(label, kv):
            self.events[Event.DAMAGED] += 1
            with suppress(OSError):
                path.unlink()
            raise OSError(errno.EILSEQ, "a file of the shared tier is not the block that it is named for")
        self.events[Event.LOADED] += 1
        if is_old:
            with suppress(OSError):
                os.utime(path)

    def leading(self, digests: Sequence[bytes], parent: bytes) -> int:
        """Return how many blocks at the beginning of this chain have files. `parent`: digest before the first block.

        A file is removed before the file that it needs. So a chain's files are always its first ones, and a binary
        search finds the last of them.
        """
        chain = (parent, *digests)

        def is_there(index: int) -> bool:
            return self._path(chain[index + 1], chain[index]).exists()

        if not digests or not is_there(0):
            return 0
        low, high = 1, len(digests)
        while low < high:  # the first `low` are there
            middle = high if low == 1 else (low + high + 1) // 2  # usually all of them are there, or only a few
            if is_there(middle - 1):
                low = middle
            else:
                high = middle - 1
        return low

    def forget_all(self) -> None:
        """Move this generation's blocks out of reach of all engines at once; the next sweep removes them."""
        with suppress(FileNotFoundError):
            self.path.rename(self.root / f"gone-{self.writer}-{next(self._numbers)}")
        self._made.clear()
        self.open()

    def _is_there(self, path: Path) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        if abs(time.time() - status.st_mtime) > TOUCH_S:
            with suppress(FileNotFoundError):
                os.utime(path)
        return status.st_size == self.file_bytes

    def _write(self, path: Path, head: bytes, kv: memoryview) -> None:
        temporary = self.path / TEMPORARY / f"{self.writer}-{next(self._numbers)}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another engine has moved the generation out of reach
            self._made.clear()
            self.open()
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write(descriptor, [memoryview(head), kv])
            finally:
                os.close(descriptor)  # this is when NFS reports what it could not write
            self._rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _rename(self, temporary: Path, path: Path) -> None:
        if path.parent.name not in self._made:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._made.add(path.parent.name)
        try:
            temporary.rename(path)
        except FileNotFoundError:
            self._made.clear()
            path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.rename(path)

    def _path(self, digest: bytes, parent: bytes) -> Path:
        name = digest.hex()
        return self.path / name[:2] / f"{name}-{parent.hex()[:PARENT_DIGITS]}"

    def _head(self, label: Label, kv: memoryview) -> bytes:
        whole = xxh3_128(label.digest)
        whole.update(kv)
        head = _HEAD.pack(
            _MAGIC,
            FORMAT,
            self.block_size,
            self.block_bytes,
            self.fingerprint,
            label.digest,
            label.parent,
            xxh3_128_digest(label.content),
            whole.digest(),
        )
        return head + xxh3_64_digest(head)


def _read(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers from the file's start; return the number of bytes read, plus one if the file is longer."""
    done = 0
    for buffer in buffers:
        filled = 0
        while filled < len(buffer) and (part := os.preadv(descriptor, [buffer[filled:]], done)):
            filled += part
            done += part
    return done + len(os.pread(descriptor, 1, done))


def _write(descriptor: int, buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            done += os.write(descriptor, buffer[done:])
