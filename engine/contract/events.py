"""Messages about what pods hold, as bytes: engines' reports, and what gateways tell each other of other pods.

    u8 version | u8 kind | u16 0 | u32 stride bytes | u64 epoch | u64 seq | the body, by kind

The head is the same for all kinds. `epoch` identifies one life of the sender. `seq` counts its messages from 1, and a
snapshot of an engine carries the seq of the last delta that it contains. The body of an engine's delta or snapshot:

    load report | u32 removed | u32 stored gpu | u32 stored host | u32 stored disk | the keys of these lists, u64 each

Little-endian throughout. A reader applies removed keys before stored ones; a key stored again has moved to that tier.
The body of gateways' messages: `router/peer_sync/codec.py`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from engine.contract.fetch_costs import unpack_fetch_costs
from engine.contract.load import LOAD_REPORT_BYTES, LoadReport, pack_load, unpack_load
from engine.contract.prefix_key import PrefixKey

VERSION = 1
"""Of engines' messages."""
GATEWAY_VERSION = 2
"""Of gateways' messages. Version 1 had other heads and bodies."""
MAX_KEYS = 2**22
"""Most keys in one message: 32 MiB. Gateways reject the messages of a pod that holds more keys."""
MAX_LOADS = 4096
"""Most load reports that a decoder remembers."""
_HEAD = struct.Struct("<BBHIQQ")
_COUNTS = struct.Struct("<IIII")
_BODY = _HEAD.size + LOAD_REPORT_BYTES
_KEYS_AT = _BODY + _COUNTS.size


class Tier(IntEnum):
    """The place of a block's KV, fastest first."""

    GPU = 0
    HOST = 1
    DISK = 2


class MessageKind(IntEnum):
    """What a message is about."""

    DELTA = 1
    """A change of what an engine holds."""
    SNAPSHOT = 2
    """All that an engine holds."""
    SENT = 3
    """What a gateway sent to pods that publish nothing, and what became of it."""
    ASSUMED = 4
    """All that a gateway assumes about a pod that publishes nothing."""


class DecodeError(ValueError):
    """Bytes that are not a message; the reader must resynchronise the pod."""


class UnknownVersion(DecodeError):
    """A message of a sender that is too new, or too old, for this program."""


_KINDS = {int(kind): kind for kind in MessageKind}
_ENGINE_KINDS = (MessageKind.DELTA, MessageKind.SNAPSHOT)
HEAD_BYTES = _HEAD.size
Keys = tuple[PrefixKey, ...]


class Head(NamedTuple):
    """The head of a message."""

    kind: MessageKind
    stride: int
    """Bytes per prefix key."""
    epoch: int
    seq: int


def pack_head(version: int, head: Head) -> bytes:
    """Return the head as bytes."""
    return _HEAD.pack(version, head.kind, 0, head.stride, head.epoch, head.seq)


def unpack_head(data: bytes, version: int) -> Head:
    """Return the head of a message. Raises UnknownVersion if it has another version, and DecodeError."""
    if data and data[0] != version:
        raise UnknownVersion(f"message of version {data[0]}, expected {version}: upgrade all gateways and engines")
    try:
        _, kind, _, stride, epoch, seq = _HEAD.unpack_from(data)
        return Head(_KINDS[kind], stride, epoch, seq)
    except KeyError:
        raise DecodeError(f"message of kind {kind}") from None
    except struct.error as error:
        raise DecodeError(str(error)) from None


@dataclass(frozen=True, slots=True)
class RegistryMessage:
    """One delta or snapshot of one pod. `stored[tier]` lists parent keys first, `removed` lists child keys first."""

    kind: MessageKind
    stride: int
    epoch: int
    seq: int
    load: LoadReport
    removed: Keys = ()
    stored: tuple[Keys, Keys, Keys] = ((), (), ())


def encode(message: RegistryMessage) -> bytes:
    """Return the message as bytes."""
    lists = (message.removed, *message.stored)
    return b"".join(
        (
            pack_head(VERSION, Head(message.kind, message.stride, message.epoch, message.seq)),
            pack_load(message.load),
            _COUNTS.pack(*map(len, lists)),
            *map(pack_keys, lists),
        )
    )


class Decoder:
    """Reads messages. It decodes a load report that recurs, such as an idle engine's, only once."""

    def __init__(self) -> None:
        self._loads: dict[tuple[bytes, bytes], LoadReport] = {}

    def decode(self, data: bytes, fetch: bytes = b"") -> RegistryMessage:
        """Return the message in `data`. `fetch`: the packed fetch costs, which become part of its load.

        Raises UnknownVersion, and DecodeError on a bad kind, a wrong length, or absurd numbers.
        """
        kind, stride, epoch, seq = unpack_head(data, VERSION)
        if kind not in _ENGINE_KINDS:
            raise DecodeError(f"message of kind {kind} from an engine")
        try:
            load = self._load(data, fetch)
            counts = _COUNTS.unpack_from(data, _BODY)
        except (struct.error, ValueError) as error:
            raise error if isinstance(error, DecodeError) else DecodeError(str(error)) from None
        total = sum(counts)
        if total > MAX_KEYS:
            raise DecodeError(f"registry message with {total} keys, more than {MAX_KEYS}")
        if len(data) != _KEYS_AT + 8 * total:
            raise DecodeError(f"registry message of {len(data)} bytes, expected {_KEYS_AT + 8 * total}")
        if not total:
            return RegistryMessage(kind, stride, epoch, seq, load)
        keys = unpack_keys(data[_KEYS_AT:])
        gpu, host, disk = accumulate(counts[:3])
        return RegistryMessage(
            kind, stride, epoch, seq, load, keys[:gpu], (keys[gpu:host], keys[host:disk], keys[disk:])
        )

    def _load(self, data: bytes, fetch: bytes) -> LoadReport:
        packed = (data[_HEAD.size : _BODY], fetch)
        load = self._loads.get(packed)
        if load is None:
            if len(self._loads) >= MAX_LOADS:
                self._loads.clear()
            load = unpack_load(packed[0])
            if fetch:
                load = replace(load, fetch=unpack_fetch_costs(fetch))
            self._loads[packed] = load
        return load


def decode(data: bytes) -> RegistryMessage:
    """Return one message. See `Decoder`."""
    return Decoder().decode(data)


def pack_keys(keys: Iterable[int]) -> bytes:
    """Return the keys as u64 each, little-endian."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(data: bytes) -> Keys:
    """The inverse of `pack_keys`, for bytes that are a multiple of 8."""
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)  # type: ignore[arg-type]  # NewType over int, unboxed by array
