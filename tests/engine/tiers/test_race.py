"""Fetch or recompute, in virtual time: never slower than without a tier, and near the better of the two."""

from __future__ import annotations

import pytest

from engine.backend.profiles import PROFILES
from tests.bench.tier_race import in_virtual_time, race

H100 = PROFILES["h100-8b"]


@pytest.mark.parametrize(("tokens", "gb_s"), [(256, 0.05), (256, 20.0), (4096, 4.0), (4096, 6.0)])
def test_the_first_token_comes_near_the_better_way(tokens: int, gb_s: float) -> None:
    point = in_virtual_time(race(H100, tokens, gb_s * 1e9))
    assert point.of_computing <= 1.05
    assert point.of_the_better <= 1.15
    assert (point.share > 0) == (gb_s >= 6), "the race has a winner here"


@pytest.mark.parametrize("factor", [5, 1000])
def test_a_tier_that_has_become_slow_is_given_up(factor: int) -> None:
    """The rate learnt says 20 GB/s: what is lost until the fetch is given up is bounded."""
    point = in_virtual_time(race(H100, 4096, 20e9 / factor, believed=20e9))
    assert point.of_computing <= 1.05
    assert point.share < 1
