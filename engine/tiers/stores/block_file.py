"""A file of KV blocks that shows which of its blocks are whole, whatever happened to the file.

    head (4096 bytes): magic, format, slots, bytes a block, tokens a block, fingerprint, xxh3_64 of all before
    slot i, at 4096 + i * (4096 + bytes a block): label (4096 bytes), then the block's KV

    label: magic, turn, digest, parent's digest, xxh3_128 of digest and KV, bytes of content, number of keys, content,
           keys, xxh3_64 of all before

Little-endian. A label is written after its KV. So after a killed process, a torn write or a flipped bit, either the
label or the KV does not agree with its checksum, and the block counts as missing. Nothing is ever synced.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64_digest, xxh3_128

from engine.contract.prefix_key import PrefixKey

FORMAT = 2
HEAD_BYTES = LABEL_BYTES = 4096
_HEAD = struct.Struct("<8sIQQI32s")
_LABEL = struct.Struct("<8sQ32s32s16sII")
_HEAD_MAGIC, _LABEL_MAGIC = b"WARMKVF\0", b"WARMKVB\0"
_SUM_BYTES = 8
_CLOSED = -1
_LABEL_ROOM = LABEL_BYTES - _LABEL.size - _SUM_BYTES
NO_DIGEST = bytes(32)
"""The parent of a chain's first block."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a block holds: enough to index it again."""

    digest: bytes
    parent: bytes
    content: bytes
    """Its tokens, like `CachedSequence.contents`, after the salt's digest if it is a chain's first block."""
    keys: tuple[PrefixKey, ...] = ()
    turn: int = 0
    """Order of writing; a later block has a greater number."""

    @property
    def fits(self) -> bool:
        """Whether a slot has room for the label. Labels of blocks of a thousand tokens do not fit."""
        return len(self.content) + 8 * len(self.keys) <= _LABEL_ROOM


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a file. A file of another shape belongs to another engine, and is not read."""

    slots: int
    block_bytes: int
    block_size: int
    fingerprint: bytes
    """32 bytes: the model and the layout of its KV."""


class Medium(Protocol):
    """Reads and writes a file's bytes. Raises OSError, as disks do."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer from the offset on; return the number of bytes read."""
        ...

    def write(self, buffer: memoryview | bytes, offset: int) -> None:
        """Write the whole buffer."""
        ...

    def resize(self, size: int) -> None:
        """Cut the file to this size, or add zeros up to it."""
        ...

    def close(self) -> None:
        """Close the file. From then on every other method raises OSError."""
        ...


class FileMedium:
    """A real file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `Medium.read_into`."""
        done = 0
        while done < len(buffer) and (count := os.preadv(self._descriptor, [buffer[done:]], offset + done)):
            done += count
        return done

    def write(self, buffer: memoryview | bytes, offset: int) -> None:
        """See `Medium.write`."""
        view, done = memoryview(buffer), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], offset + done)

    def resize(self, size: int) -> None:
        """See `Medium.resize`."""
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """See `Medium.close`. The number may soon be that of another file, which a late call must not touch."""
        descriptor, self._descriptor = self._descriptor, _CLOSED
        os.close(descriptor)


class BlockDamaged(OSError):
    """The slot does not hold the block that was asked for, or the block is damaged."""


class BlockFile:
    """Slots of one shape on a medium. Calls for different slots may be made on different threads."""

    def __init__(self, medium: Medium, shape: Shape) -> None:
        self.shape = shape
        self._medium = medium
        self._stride = LABEL_BYTES + shape.block_bytes
        self._turn = 0

    @staticmethod
    def bytes_for(shape: Shape) -> int:
        """Return the size of the whole file in bytes."""
        return HEAD_BYTES + shape.slots * (LABEL_BYTES + shape.block_bytes)

    def is_of_this_shape(self) -> bool:
        """Whether the file's head is whole, and of this format and shape."""
        head = bytearray(HEAD_BYTES)
        return self._medium.read_into(memoryview(head), 0) == HEAD_BYTES and bytes(head) == self._head()

    def clear(self) -> None:
        """Make this an empty file of this shape, whatever it held."""
        self._medium.resize(0)
        self._medium.resize(self.bytes_for(self.shape))
        self._medium.write(self._head(), 0)

    def write(self, slot: int, label: Label, kv: memoryview) -> None:
        """Store a block. Raises OSError; what the slot held before is then gone, too."""
        self._turn += 1
        at = self._offset(slot)
        self._medium.write(kv, at + LABEL_BYTES)
        self._medium.write(_pack(label, self._turn, _kv_sum(label.digest, kv)), at)

    def read(self, slot: int, digest: bytes, kv: memoryview) -> None:
        """Fill `kv` with the block of this digest. Raises BlockDamaged, or an OSError of the medium."""
        at = self._offset(slot)
        found = self._label(at)
        if found is None or found[0].digest != digest:
            raise BlockDamaged(f"slot {slot} does not hold the block that it should")
        if self._medium.read_into(kv, at + LABEL_BYTES) != len(kv) or _kv_sum(digest, kv) != found[1]:
            raise BlockDamaged(f"slot {slot} has a wrong checksum")

    def labels(self) -> Iterator[tuple[int, Label]]:
        """Iterate over every slot with a whole label. KV is checked only when it is read."""
        for slot in range(self.shape.slots):
            try:
                found = self._label(self._offset(slot))
            except OSError:
                continue
            if found is not None:
                self._turn = max(self._turn, found[0].turn)
                yield slot, found[0]

    def close(self) -> None:
        """Close the medium, and give up the file's lock."""
        self._medium.close()

    def _offset(self, slot: int) -> int:
        return HEAD_BYTES + slot * self._stride

    def _head(self) -> bytes:
        shape = self.shape
        fields = (shape.slots, shape.block_bytes, shape.block_size, shape.fingerprint)
        head = _HEAD.pack(_HEAD_MAGIC, FORMAT, *fields).ljust(HEAD_BYTES - _SUM_BYTES, b"\0")
        return head + xxh3_64_digest(head)

    def _label(self, offset: int) -> tuple[Label, bytes] | None:
        """Return the label at this offset and its KV's checksum; None if the label is damaged."""
        packed = bytearray(LABEL_BYTES)
        if self._medium.read_into(memoryview(packed), offset) != LABEL_BYTES:
            return None
        body, checksum = bytes(packed[:-_SUM_BYTES]), bytes(packed[-_SUM_BYTES:])
        magic, turn, digest, parent, kv_sum, content_bytes, keys = _LABEL.unpack_from(body)
        end = _LABEL.size + content_bytes
        if magic != _LABEL_MAGIC or checksum != xxh3_64_digest(body) or content_bytes + 8 * keys > _LABEL_ROOM:
            return None
        held = tuple(PrefixKey(key) for key in struct.unpack_from(f"<{keys}Q", body, end))
        return Label(digest, parent, body[_LABEL.size : end], held, turn), kv_sum


def open_file(path: Path, shape: Shape) -> tuple[BlockFile, int, bool]:
    """Open the file at `path`; create it, or create it anew if it is not of this shape.

    Returns the file, its descriptor, which holds its lock, and whether a damaged file or one of another shape was
    there. Raises OSError; BlockingIOError if another process uses the file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file = BlockFile(FileMedium(descriptor), shape)
        is_new = os.fstat(descriptor).st_size == 0
        is_foreign = not is_new and not file.is_of_this_shape()
        if is_new or is_foreign:
            file.clear()
    except BaseException:
        os.close(descriptor)
        raise
    return file, descriptor, is_foreign


def check_unused(path: Path) -> None:
    """Raise BlockingIOError if a process uses the file at `path`. A file that cannot be opened counts as unused."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _pack(label: Label, turn: int, kv_sum: bytes) -> bytes:
    keys = struct.pack(f"<{len(label.keys)}Q", *label.keys)
    head = _LABEL.pack(_LABEL_MAGIC, turn, label.digest, label.parent, kv_sum, len(label.content), len(label.keys))
    body = (head + label.content + keys).ljust(LABEL_BYTES - _SUM_BYTES, b"\0")
    return body + xxh3_64_digest(body)


def _kv_sum(digest: bytes, kv: memoryview) -> bytes:
    """Return a checksum of digest and KV together, because a block's KV in another block's place is wrong, too."""
    whole = xxh3_128(digest)
    whole.update(kv)
    return whole.digest()
