"""Turns KV events as vLLM and SGLang send them, in all known forms, into one form. Pure.

    batch   [ts, events, data_parallel_rank]  or  {"ts", "events", "data_parallel_rank"}
    event   {"type": tag, field: value, ...}  or  [tag, value, ...], fields in the order of `_STORED` or `_REMOVED`;
            a map at the end of the array has further fields (SGLang)
        hash    an integer of 64 bits, signed or not, or bytes whose last eight are that integer

Sources: vllm/distributed/kv_events.py (0.32), sglang/srt/disaggregation/kv_events.py. Unknown events and unknown fields
are counted and skipped, so that an engine of a later release is followed as far as it is understood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from engine.contract.bounded_msgpack import unpack
from engine.contract.events import Tier

MAX_BYTES = 8 * 2**20
"""Largest batch. A prompt of a million tokens makes about 6 MiB. Requests wait while a batch is read: a real one of
this size takes tenths of a second, and the worst that an engine can make up takes 3 s and 0.6 GB."""
MAX_EVENTS = 2**18
"""Events of a batch. Engines remove each block by an event of its own, and a prompt of a million tokens may evict
65,536 blocks."""
MAX_BLOCK_TOKENS = 65_536
MAX_NAME_CHARS = 1024
"""Length of a session, an adapter or a salt."""
_MASK = 2**64 - 1
_HASH_BYTES = 8

_STORED = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED = ("type", "block_hashes", "medium", "group_idx", "locality", "ownership")
_CLEARED = ("type",)
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": _CLEARED}
_KNOWN = {name: frozenset(fields) for name, fields in _FIELDS.items()}
_KNOWN["BlockStored"] |= {"cache_salt"}
_TIERS = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "HOST": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}
_FULL_ATTENTION = frozenset((None, "full_attention", "mla_attention", "full", "FULL"))
_LOCAL = frozenset((None, "LOCAL", "local"))


class BadBatch(ValueError):
    """The bytes are no batch of events, or one of an absurd size."""


@dataclass(slots=True)
class Stored:
    """Blocks that are in a cache from now on, each the continuation of the one before."""

    hashes: list[int]
    parent: int | None
    """Hash of the block before the first one; None: the first one begins a prompt."""
    tokens: Sequence[Any]
    """Tokens of all blocks; empty if the event is about blocks that were stored elsewhere before."""
    block_tokens: int
    tier: Tier
    session: str | None
    space: str
    """Adapter and salt: equal tokens in two spaces are different blocks."""
    extra: Sequence[Any] | None
    """What else distinguishes each block from others with equal tokens."""
    group: int
    is_full_attention: bool


@dataclass(slots=True)
class Removed:
    """One copy of each of these blocks is gone from a tier."""

    hashes: list[int]
    tier: Tier
    group: int


@dataclass(slots=True)
class Cleared:
    """Every block is gone."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class WireCounts:
    """What was skipped, since the start."""

    unknown_events: int = 0
    """Events of an unknown type."""
    unknown_fields: int = 0
    """Events with an unknown field or medium."""
    bad_events: int = 0
    """Events whose fields contradict each other, or have the wrong type."""
    elsewhere: int = 0
    """Events of blocks that this engine alone cannot use: in a remote cache, or owned by somebody else."""


@dataclass(slots=True)
class Batch:
    """The events of one step of an engine, in order."""

    events: list[Event]
    rank: int | None = None
    counts: WireCounts = field(default_factory=WireCounts)


def decode(payload: bytes) -> Batch:
    """Return the events in `payload`. Raises BadBatch if it is no batch at all."""
    if len(payload) > MAX_BYTES:
        raise BadBatch(f"a batch of {len(payload)} bytes, more than {MAX_BYTES}")
    try:
        said = unpack(payload, use_list=True)
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError, msgpack.UnpackException) as error:
        raise BadBatch(f"not msgpack: {type(error).__name__}: {str(error)[:200]}") from None
    rank: Any = None
    if isinstance(said, Mapping):
        events, rank = said.get("events"), said.get("data_parallel_rank", said.get("attn_dp_rank"))
    elif isinstance(said, list) and len(said) >= 2:
        events, rank = said[1], said[2] if len(said) > 2 else None
    else:
        raise BadBatch("neither a map nor an array of time and events")
    if not isinstance(events, list):
        raise BadBatch("a batch without a list of events")
    if len(events) > MAX_EVENTS:
        raise BadBatch(f"a batch of {len(events)} events, more than {MAX_EVENTS}")
    batch = Batch([], rank if _is_count(rank) else None)
    for said_event in events:
        try:
            event = _event(said_event, batch.counts)
        except (TypeError, ValueError, KeyError, OverflowError):
            batch.counts.bad_events += 1
            continue
        if event is not None:
            batch.events.append(event)
    return batch


def _event(said: Any, counts: WireCounts) -> Event | None:
    if isinstance(said, dict):
        tag, fields = said.get("type"), said
    else:
        tag = said[0] if isinstance(said, list) and said else None
        fields = {}
    known = _KNOWN.get(tag) if isinstance(tag, str) else None
    if known is None:
        counts.unknown_events += 1
        return None
    assert isinstance(tag, str)
    if isinstance(said, list):
        names = _FIELDS[tag]
        if said and isinstance(said[-1], dict):
            fields = {**dict(zip(names, said[:-1], strict=False)), **said[-1]}
        else:
            fields = dict(zip(names, said, strict=False))
        if len(said) > len(names) + 1:
            counts.unknown_fields += 1
    if not fields.keys() <= known:
        counts.unknown_fields += 1
    if tag == "AllBlocksCleared":
        return Cleared()
    medium = fields.get("medium")
    if medium not in _TIERS:
        counts.unknown_fields += 1
        return None
    if fields.get("locality") not in _LOCAL or (fields.get("ownership") and _TIERS[medium] is Tier.GPU):
        counts.elsewhere += 1
        return None
    hashes = [_hash(one) for one in fields["block_hashes"]]
    group = fields.get("group_idx") or 0
    if not _is_count(group):
        raise ValueError("group_idx")
    if tag == "BlockRemoved":
        return Removed(hashes, _TIERS[medium], group)
    return _stored(fields, hashes, _TIERS[medium], group)


def _stored(fields: Mapping[str, Any], hashes: list[int], tier: Tier, group: int) -> Stored | None:
    tokens, block_tokens, extra = fields.get("token_ids") or (), fields["block_size"], fields.get("extra_keys")
    if not hashes:
        return None
    if not _is_count(block_tokens) or block_tokens > MAX_BLOCK_TOKENS:
        raise ValueError("block_size")
    if not isinstance(tokens, (list, tuple)) or (tokens and len(tokens) != block_tokens * len(hashes)):
        raise ValueError("token_ids")
    if extra is not None and (not isinstance(extra, list) or len(extra) != len(hashes)):
        raise ValueError("extra_keys")
    parent = fields.get("parent_block_hash")
    session = fields.get("session_id")
    lora = fields.get("lora_name") or fields.get("lora_id")
    salt = fields.get("cache_salt")
    return Stored(
        hashes,
        None if parent is None else _hash(parent),
        tokens,
        block_tokens,
        tier,
        session[:MAX_NAME_CHARS] if isinstance(session, str) and session else None,
        "" if lora is None and salt is None else f"{lora or ''}\x1f{salt or ''}"[:MAX_NAME_CHARS],
        extra if extra is not None and any(extra) else None,
        group,
        fields.get("kv_cache_spec_kind") in _FULL_ATTENTION,
    )


def _hash(said: Any) -> int:
    """Return the hash as 64 bits. Raises TypeError or ValueError for what is no hash."""
    if isinstance(said, int) and not isinstance(said, bool):
        return said & _MASK
    if isinstance(said, bytes) and said:
        return int.from_bytes(said[-_HASH_BYTES:], "big")
    raise TypeError("block_hashes")


def _is_count(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 2**31
