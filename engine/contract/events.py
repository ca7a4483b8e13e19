"""Registry entries and snapshots as bytes: what an engine writes to Redis and a gateway reads.

    u8 version (1) | u8 kind (1 delta, 2 snapshot) | u16 0 | u32 stride bytes | u64 epoch | u64 seq | load report
    | u32 removed | u32 stored gpu | u32 stored host | u32 stored disk | the keys of these four lists, u64 each

Little-endian throughout. `seq` counts a pod's deltas from 1 within an epoch; a snapshot carries the seq of the last
delta it contains. A reader applies removed keys before stored ones; a key stored again has moved to that tier.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from engine.contract.load import LOAD_REPORT_BYTES, LoadReport, pack_load, unpack_load
from engine.contract.prefix_key import PrefixKey

VERSION = 1
_HEAD = struct.Struct("<BBHIQQ")
_COUNTS = struct.Struct("<IIII")
_BODY = _HEAD.size + LOAD_REPORT_BYTES


class Tier(IntEnum):
    """Where a block's KV lies, fastest first."""

    GPU = 0
    HOST = 1
    DISK = 2


class Kind(IntEnum):
    """A delta changes what is known of a pod; a snapshot replaces it."""

    DELTA = 1
    SNAPSHOT = 2


class DecodeError(ValueError):
    """Bytes that are not a message of this version; the reader must resynchronise the pod."""


Keys = tuple[PrefixKey, ...]


@dataclass(frozen=True, slots=True)
class RegistryMessage:
    """One delta or snapshot of one pod. `stored[tier]` holds keys parents first, `removed` children first."""

    kind: Kind
    stride: int
    epoch: int
    seq: int
    load: LoadReport
    removed: Keys = ()
    stored: tuple[Keys, Keys, Keys] = ((), (), ())


def encode(message: RegistryMessage) -> bytes:
    """The message as bytes."""
    lists = (message.removed, *message.stored)
    return b"".join(
        (
            _HEAD.pack(VERSION, message.kind, 0, message.stride, message.epoch, message.seq),
            pack_load(message.load),
            _COUNTS.pack(*map(len, lists)),
            *map(_pack_keys, lists),
        )
    )


def decode(data: bytes) -> RegistryMessage:
    """The message in `data`. Raises DecodeError on another version, a bad kind, or a wrong length."""
    try:
        version, kind, _, stride, epoch, seq = _HEAD.unpack_from(data)
        if version != VERSION:
            raise DecodeError(f"registry message of version {version}, expected {VERSION}: upgrade gateway and engines")
        load = unpack_load(data, _HEAD.size)
        counts = _COUNTS.unpack_from(data, _BODY)
        kind = Kind(kind)
    except (struct.error, ValueError) as error:
        raise DecodeError(str(error)) from None
    start = _BODY + _COUNTS.size
    if len(data) != start + 8 * sum(counts):
        raise DecodeError(f"registry message of {len(data)} bytes, expected {start + 8 * sum(counts)}")
    lists = []
    for count in counts:
        lists.append(_unpack_keys(data[start : start + 8 * count]))
        start += 8 * count
    removed, gpu, host, disk = lists
    return RegistryMessage(kind, stride, epoch, seq, load, removed, (gpu, host, disk))


def _pack_keys(keys: Iterable[PrefixKey]) -> bytes:
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_keys(data: bytes) -> Keys:
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)  # type: ignore[arg-type]  # NewType over int, unboxed by array
