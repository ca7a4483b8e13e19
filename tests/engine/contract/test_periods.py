"""How often engines publish, by the size of their fleet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.periods import SMALL_FLEET, Periods, periods
from router.fleet.fleet import JITTER
from router.registry.reader import REPLAY_S
from router.settings.constants import CONSTANTS
from router.views.reported import FRESH_S

sizes = st.integers(0, 10**9)


@given(st.integers(-(10**9), SMALL_FLEET))
def test_a_small_fleet_loses_no_freshness(pods: int) -> None:
    assert periods(pods) == Periods()


@given(sizes, sizes)
def test_a_larger_fleet_publishes_less_often_each_and_no_less_in_all(one: int, other: int) -> None:
    small, large = sorted((one, other))
    a, b = periods(small), periods(large)
    assert a.batch_s <= b.batch_s
    assert a.load_s <= b.load_s
    assert a.heartbeat_s <= b.heartbeat_s
    assert a.snapshot_s <= b.snapshot_s
    assert a.stream_entries <= b.stream_entries
    assert small / a.batch_s <= large / b.batch_s


@given(sizes)
def test_what_gateways_rest_on_holds_at_any_size(pods: int) -> None:
    pace = periods(pods)
    probes_s = CONSTANTS.probe_interval_s * (1 - JITTER)
    assert pace.heartbeat_s < probes_s, "otherwise a gateway would probe pods that it has just heard from"
    assert pace.heartbeat_s < FRESH_S, "otherwise an idle pod's report has half the weight"
    assert pace.snapshot_s < REPLAY_S, "otherwise the deltas after a snapshot are not replayed"
    assert pace.renewal_s <= pace.heartbeat_s


@given(st.integers(1, 25_000))
def test_the_stream_holds_what_is_replayed(pods: int) -> None:
    pace = periods(pods)
    assert pace.stream_entries >= pods / pace.batch_s * REPLAY_S


def test_a_thousand_pods_and_ten_thousand() -> None:
    assert round(1000 / periods(1000).batch_s, -2) == 5100
    assert round(10_000 / periods(10_000).batch_s, -2) == 16_000
