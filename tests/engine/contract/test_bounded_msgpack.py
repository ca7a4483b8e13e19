"""Msgpack of others: lists and maps are bounded before they fill the memory."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.bounded_msgpack import MAX_NODES, TooManyNodes, unpack

VALUES = st.recursive(
    st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
)


@given(VALUES)
def test_a_message_is_read_as_it_was_written(value: object) -> None:
    assert unpack(msgpack.packb(value), use_list=True) == value


@pytest.mark.parametrize("node", [b"\x90", b"\x80", b"\x91\x01", b"\x81\x01\x02"])
def test_lists_and_maps_are_bounded(node: bytes) -> None:
    count = 8 * 2**20 // len(node)
    tracemalloc.start()
    try:
        with pytest.raises(TooManyNodes):
            unpack(b"\xdd" + count.to_bytes(4, "big") + node * count, use_list=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 2**20, peak
    most = MAX_NODES - 1
    assert len(unpack(b"\xdd" + most.to_bytes(4, "big") + node * most, use_list=True)) == most
