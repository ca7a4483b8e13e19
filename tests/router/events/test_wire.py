"""All forms of KV events mean the same; bytes that are no events do no harm."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.events import Tier
from router.events.wire import MAX_BYTES, MAX_EVENTS, BadBatch, Cleared, Removed, Stored, decode

BIG = 2**64 - 3
STORED = {
    "type": "BlockStored",
    "block_hashes": [BIG, 7],
    "parent_block_hash": 5,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": None,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
    "locality": None,
    "ownership": None,
    "session_id": "s",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [BIG], "medium": "CPU", "group_idx": 1}
CLEARED = {"type": "AllBlocksCleared"}


def shortest(event: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is None, as vLLM leaves out defaults."""
    return {name: value for name, value in event.items() if value is not None}


def as_bytes(event: dict[str, Any]) -> dict[str, Any]:
    """Use hashes of 32 bytes, as without VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""
    event = dict(event)
    for name in ("block_hashes", "parent_block_hash"):
        if isinstance(event.get(name), list):
            event[name] = [b"\x11" * 24 + struct.pack(">Q", one) for one in event[name]]
        elif name in event:
            event[name] = b"\x11" * 24 + struct.pack(">Q", event[name])
    return event


def signed(event: dict[str, Any]) -> dict[str, Any]:
    """Use hashes that are signed integers."""
    return event | {"block_hashes": [one - 2**64 if one >= 2**63 else one for one in event["block_hashes"]]}


@pytest.mark.parametrize("batch_form", ["array", "map", "array without rank"])
@pytest.mark.parametrize("event_form", ["map", "shortest map", "array", "bytes", "signed", "array and map"])
def test_all_forms_say_the_same(batch_form: str, event_form: str) -> None:
    """Batches and events may be arrays or maps, hashes integers or bytes."""
    shapes: dict[str, Any] = {
        "map": lambda event: event,
        "shortest map": shortest,
        "array": lambda event: list(event.values()),
        "bytes": lambda event: as_bytes(event),
        "signed": lambda event: signed(event),
        "array and map": lambda event: [*list(event.values())[:5], dict(list(event.items())[5:])],
    }
    events = [shapes[event_form](event) for event in (STORED, REMOVED)] + [CLEARED]
    batch: Any = {"ts": 1.5, "events": events, "data_parallel_rank": 3}
    if batch_form != "map":
        batch = list(batch.values())[: 3 if batch_form == "array" else 2]
    decoded = decode(msgpack.packb(batch))
    stored, removed, cleared = decoded.events
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent, list(stored.tokens), stored.session) == ([BIG, 7], 5, [1, 2, 3, 4], "s")
    assert (stored.block_tokens, stored.tier, stored.group, stored.is_full_attention) == (2, Tier.GPU, 0, True)
    assert removed == Removed([BIG], Tier.HOST, 1)
    assert cleared == Cleared()
    assert decoded.rank == (None if batch_form == "array without rank" else 3)
    assert (decoded.counts.unknown_events, decoded.counts.unknown_fields, decoded.counts.bad_events) == (0, 0, 0)


def test_what_is_not_known_is_counted_and_what_it_stands_beside_is_read() -> None:
    """This covers events of a later release, unknown media, and blocks that are not this engine's own."""
    events = [
        {"type": "BlockPinned", "block_hashes": [1]},
        shortest(STORED) | {"temperature": 3},
        REMOVED | {"medium": "TAPE"},
        STORED | {"locality": "REMOTE"},
        STORED | {"ownership": "somebody"},
        STORED | {"token_ids": [1]},
        STORED | {"block_hashes": ["x"]},
        17,
    ]
    decoded = decode(msgpack.packb([0.0, events]))
    assert len(decoded.events) == 1
    counts = decoded.counts
    assert (counts.unknown_events, counts.unknown_fields, counts.elsewhere, counts.bad_events) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, Tier.GPU), ("GPU", Tier.GPU), ("CPU", Tier.HOST), ("CPU_PINNED", Tier.HOST)]
    + [(medium, Tier.DISK) for medium in ("STORAGE", "FS", "OBJ", "DISK", "EXTERNAL")],
)
def test_media(medium: str | None, tier: Tier) -> None:
    """Each medium has its tier."""
    assert decode(msgpack.packb([0, [REMOVED | {"medium": medium}]])).events == [Removed([BIG], tier, 1)]


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\x91" * 100_000])
def test_headers_that_promise_more_than_there_is(payload: bytes) -> None:
    """A header may announce data that does not follow. This takes neither memory nor stack."""
    with pytest.raises(BadBatch):
        decode(payload)


def test_a_batch_with_too_many_events_is_refused_before_any_is_read() -> None:
    """Requests wait while a batch is read, and a megabyte has room for half a million events."""

    def batch(events: int) -> bytes:
        return b"\x92\x00\xdd" + events.to_bytes(4, "big") + b"\x90" * events

    assert decode(batch(MAX_EVENTS)).counts.unknown_events == MAX_EVENTS
    for events in (MAX_EVENTS + 1, MAX_BYTES - 7):
        with pytest.raises(BadBatch, match="more than"):
            decode(batch(events))
    with pytest.raises(BadBatch, match="bytes"):
        decode(batch(MAX_BYTES))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=40) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=5),
    max_leaves=12,
)
FIELDS = st.dictionaries(st.sampled_from([*STORED, "cache_salt"]), VALUES, max_size=15)
EVENTS = st.one_of(
    VALUES,
    st.builds(lambda fields, tag: fields | {"type": tag}, FIELDS, st.sampled_from(["BlockStored", "BlockRemoved"])),
    st.builds(lambda changed: {**STORED, **changed}, FIELDS),
    st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(["BlockStored", "BlockRemoved"]), st.lists(VALUES)),
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.lists(EVENTS, max_size=4).map(lambda e: msgpack.packb([0.0, e, 0]))))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    """Nothing else is raised, and the results have their declared types."""
    try:
        batch = decode(payload)
    except BadBatch:
        return
    for event in batch.events:
        if isinstance(event, Stored):
            assert all(0 <= one < 2**64 for one in event.hashes)
            assert not event.tokens or len(event.tokens) == len(event.hashes) * event.block_tokens
