"""Fetch costs beside a load report: round trips, later versions, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.events import DecodeError, Decoder, MessageKind, RegistryMessage, decode, encode
from engine.contract.fetch_costs import (
    MAX_FETCHED_TOKEN_S,
    MAX_LATENCY_S,
    NO_FETCH_COSTS,
    FetchCost,
    FetchCosts,
    pack_fetch_costs,
    unpack_fetch_costs,
)
from engine.contract.load import LoadReport

cost = st.builds(FetchCost, st.floats(0, MAX_LATENCY_S), st.floats(0, MAX_FETCHED_TOKEN_S))
costs = st.builds(FetchCosts, cost, cost, cost)
FIRST = "010003007b14ae47e17a843ff168e388b5f8e43e0000000000000000000000000000000000000000000000000000000000000000"
"""The bytes of the first version for host memory, with 10 ms and 10 us a token."""


@given(costs)
def test_round_trip(these: FetchCosts) -> None:
    assert unpack_fetch_costs(pack_fetch_costs(these)) == these


def test_the_bytes_stay_what_they_are() -> None:
    assert pack_fetch_costs(FetchCosts(host=FetchCost(0.01, 1e-5))).hex() == FIRST
    assert pack_fetch_costs(NO_FETCH_COSTS) == b""


@given(st.binary(max_size=80))
def test_noise_is_refused_or_read_but_never_crashes(noise: bytes) -> None:
    try:
        found = unpack_fetch_costs(noise)
    except ValueError:
        return
    assert unpack_fetch_costs(pack_fetch_costs(found)) == found


def test_costs_of_a_later_version_are_ignored_and_those_of_unknown_tiers() -> None:
    packed = pack_fetch_costs(FetchCosts(host=FetchCost(0.01, 1e-5)))
    assert unpack_fetch_costs(b"\x02" + packed[1:] + b"more") is NO_FETCH_COSTS
    longer = b"\x01\x00\x04\x00" + packed[4:] + bytes(16)
    assert unpack_fetch_costs(longer) == unpack_fetch_costs(packed)


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1e-9, MAX_LATENCY_S + 1])
@pytest.mark.parametrize("field", ["latency_s", "token_s"])
def test_absurd_numbers_are_refused(field: str, absurd: float) -> None:
    with pytest.raises(ValueError, match="absurd fetch costs"):
        unpack_fetch_costs(pack_fetch_costs(FetchCosts(disk=FetchCost(**{field: absurd}))))


def test_a_decoder_joins_them_to_the_load_and_refuses_a_message_whose_costs_are_broken() -> None:
    data = encode(RegistryMessage(MessageKind.DELTA, 256, 1, 1, LoadReport(running=3)))
    these = FetchCosts(shared=FetchCost(0.001, 2e-6))
    decoder = Decoder()
    assert decoder.decode(data, pack_fetch_costs(these)).load == LoadReport(running=3, fetch=these)
    assert decoder.decode(data).load == decode(data).load == LoadReport(running=3)
    with pytest.raises(DecodeError, match="fetch costs"):
        decoder.decode(data, pack_fetch_costs(these)[:-1])
