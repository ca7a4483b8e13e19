"""All that is believed about one pod, as bytes, for gateways that start later. Little-endian:

u8 version (1) | u8 0 | u16 0 | u32 stride bytes | f64 written s, by Redis's clock | u32 runs | u32 keys
| runs: f32 age s when written, u32 keys, each | keys u64, in the order in which they would be dropped
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.events import DecodeError, UnknownVersion, pack_keys, unpack_keys
from router.registry.speculation import Run

VERSION = 1
MAX_KEYS = 2**20
"""Keys of one pod: 8 MiB."""
MAX_AGE_S = 1e7
_HEAD = struct.Struct("<BBHIdII")
_RUN = struct.Struct("<fI")


@dataclass(frozen=True, slots=True)
class AssumedSnapshot:
    """Beliefs about one pod. Times in `runs`, and `written_s`, are seconds of Redis's clock."""

    stride: int
    written_s: float
    runs: Sequence[Run]


def encode_snapshot(stride: int, written_s: float, runs: Sequence[Run]) -> bytes:
    """Return the snapshot as bytes. If there are more than MAX_KEYS keys, only the last used are kept."""
    kept: list[Run] = []
    room = MAX_KEYS
    for at_s, keys in reversed(runs):
        if room > 0:
            kept.append((at_s, keys[-room:]))
            room -= len(keys)
    kept.reverse()
    heads = [_RUN.pack(min(MAX_AGE_S, max(0.0, written_s - at_s)), len(keys)) for at_s, keys in kept]
    body = [pack_keys(keys) for _, keys in kept]
    total = sum(len(keys) for _, keys in kept)
    return b"".join((_HEAD.pack(VERSION, 0, 0, stride, written_s, len(kept), total), *heads, *body))


def decode_snapshot(data: bytes) -> AssumedSnapshot:
    """Return the snapshot in `data`. Raises UnknownVersion, and DecodeError on invalid bytes or absurd numbers."""
    try:
        if data and data[0] != VERSION:
            raise UnknownVersion(f"beliefs of version {data[0]}, expected {VERSION}: upgrade all gateways")
        _, _, _, stride, written_s, run_count, total = _HEAD.unpack_from(data)
    except struct.error as error:
        raise DecodeError(f"beliefs of a pod: {error}") from None
    if total > MAX_KEYS or run_count > total or not math.isfinite(written_s) or not stride:
        raise DecodeError(f"beliefs of a pod with {total} keys in {run_count} runs, written at {written_s:g}")
    keys_at = _HEAD.size + run_count * _RUN.size
    if len(data) != keys_at + 8 * total:
        raise DecodeError(f"beliefs of a pod of {len(data)} bytes, expected {keys_at + 8 * total}")
    keys = unpack_keys(data[keys_at:])
    runs: list[Run] = []
    used = 0
    for age_s, count in _RUN.iter_unpack(data[_HEAD.size : keys_at]):
        if not 0 <= age_s <= MAX_AGE_S or used + count > total:
            raise DecodeError(f"beliefs of a pod with {count} keys used {age_s:g} s before")
        runs.append((written_s - age_s, keys[used : used + count]))
        used += count
    if used != total:
        raise DecodeError(f"beliefs of a pod with {total} keys, of which its runs have {used}")
    return AssumedSnapshot(stride, written_s, runs)
