"""Fetch or recompute, in virtual time: never slower than without a tier, and near the better of the two."""

from __future__ import annotations

import pytest

from engine.backend.profiles import PROFILES
from engine.contract.fetch_costs import FetchCost
from engine.contract.load import LoadReport
from tests.bench.tier_race import engine, in_virtual_time, race

H100 = PROFILES["h100-8b"]


@pytest.mark.parametrize(("tokens", "gb_s"), [(256, 0.05), (256, 20.0), (4096, 4.0), (4096, 6.0)])
def test_the_first_token_comes_near_the_better_way(tokens: int, gb_s: float) -> None:
    point = in_virtual_time(race(H100, tokens, gb_s * 1e9))
    assert point.of_computing <= 1.05
    assert point.of_the_better <= 1.15
    assert (point.share > 0) == (gb_s >= 6), "the race has a winner here"


async def reported() -> LoadReport:
    async with engine(H100, 4e9) as pod:
        return pod.scheduler.load()


def test_the_load_report_says_what_a_token_takes_to_fetch() -> None:
    load = in_virtual_time(reported())
    assert load.fetch.host.token_s == pytest.approx(H100.kv_token_bytes / 4e9)
    assert load.fetch.host.latency_s == 0
    assert load.fetch.disk == load.fetch.shared == FetchCost()


@pytest.mark.parametrize("factor", [5, 1000])
def test_a_tier_that_has_become_slow_is_given_up(factor: int) -> None:
    """The rate learnt says 20 GB/s: what is lost until the fetch is given up is bounded."""
    point = in_virtual_time(race(H100, 4096, 20e9 / factor, believed=20e9))
    assert point.of_computing <= 1.05
    assert point.share < 1
