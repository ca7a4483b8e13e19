"""The choice to fetch or to compute, in virtual time: never slower than without a tier, and near the better of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.backend.profiles import PROFILES
from engine.contract.fetch_costs import FetchCost
from engine.contract.load import LoadReport, StepCost
from engine.tiers.copies.fetch import Held, Prefill, compute_s
from engine.tiers.fetches import plan
from tests.bench.engine.tier_race import engine, in_virtual_time, race

H100 = PROFILES["h100-8b"]


@pytest.mark.parametrize(("tokens", "gb_s"), [(256, 0.05), (256, 20.0), (4096, 4.0), (4096, 6.0)])
def test_the_first_token_comes_near_the_better_way(tokens: int, gb_s: float) -> None:
    point = in_virtual_time(race(H100, tokens, gb_s * 1e9))
    assert point.of_computing <= 1.05
    assert point.of_the_better <= 1.15
    assert (point.share > 0) == (gb_s >= 6), "blocks are fetched only from a fast tier"


async def reported() -> LoadReport:
    async with engine(H100, 4e9) as pod:
        return pod.scheduler.load()


def test_the_load_report_says_what_a_token_takes_to_fetch() -> None:
    load = in_virtual_time(reported())
    assert load.fetch.host.token_s == pytest.approx(H100.kv_token_bytes / 4e9)
    assert load.fetch.host.latency_s == 0
    assert load.fetch.disk == load.fetch.shared == FetchCost()


def test_a_short_prompt_on_a_tier_half_as_fast_as_it_was() -> None:
    """The last blocks are not worth a fetch, because fetching them does not shorten the step that computes the rest."""
    point = in_virtual_time(race(H100, 256, 10e9, believed=20e9))
    assert point.of_computing <= 1.05
    assert 0 < point.share < 1


COST = StepCost(base_s=3e-3, token_s=22e-6)


@pytest.mark.parametrize(("cached", "fetches"), [(2000, False), (1600, True), (0, True)])
def test_a_gain_is_measured_by_what_the_pool_lacks(cached: int, fetches: bool) -> None:
    """If 2,000 of 2,150 tokens are cached, the rest is not worth a fetch that saves 1.6 ms of 6 ms."""
    held = [Held((2149 - cached) // 16, 16, 16 * 11e-6, 0.0)]
    choice = plan(Prefill(2150, cached, 2048, COST), held)
    assert (choice.fetched_blocks > 0) == fetches
    assert choice.recompute_s == compute_s(Prefill(2150, cached, 2048, COST), cached)


def test_no_step_is_thought_shorter_than_the_shortest() -> None:
    prefill = Prefill(256, 0, 2048, COST, least_s=6e-3)
    whole = plan(replace(prefill, least_s=0.0), [Held(15, 16, 16 * 3e-6, 0.0)])
    part = plan(prefill, [Held(15, 16, 16 * 3e-6, 0.0)])
    assert (whole.fetched_blocks, part.first_token_s > whole.first_token_s) == (15, True)
    assert 0 < part.fetched_blocks < 15
    assert plan(replace(prefill, least_s=8e-3), [Held(15, 16, 16 * 3e-6, 0.0)]).fetched_blocks == 0


@pytest.mark.parametrize(("next_s", "blocks"), [(0.0, 4), (5e-3, 0), (1e-3, 4)])
def test_a_fetch_that_ends_in_the_midst_of_a_step_waits_for_its_end(next_s: float, blocks: int) -> None:
    """64 tokens arrive after 0.1 ms and save 6.4 ms. With steps of 5 ms, waiting for steps to end takes longer."""
    prefill = Prefill(65, 0, 2048, StepCost(token_s=1e-4), next_s=next_s, further_s=next_s)
    assert plan(prefill, [Held(4, 16, 25e-6, 0.0)]).fetched_blocks == blocks


@pytest.mark.parametrize("factor", [5, 1000])
def test_a_tier_that_has_become_slow_is_given_up(factor: int) -> None:
    """The engine has learnt a rate of 20 GB/s. The time lost until the fetch is given up is bounded."""
    point = in_virtual_time(race(H100, 4096, 20e9 / factor, believed=20e9))
    assert point.of_computing <= 1.05
    assert point.share < 1
