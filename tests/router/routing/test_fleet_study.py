"""What the policies achieve on an emulated fleet, on seeds that were not used for tuning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.routing.policies import POLICY_NAMES, PolicyOptions, make_policy
from tests.router.routing.fleet import Arrival, Fleet, Outcome
from tests.router.routing.workloads import burst, nothing_shared, shared_prompt, tenant_chat


def outcomes(arrivals: Sequence[Arrival], names: Sequence[str] = POLICY_NAMES) -> dict[str, Outcome]:
    return {name: Fleet(make_policy(name)).run(arrivals) for name in names}


@pytest.mark.parametrize("per_s", [100.0, 300.0])
def test_one_popular_system_prompt(per_s: float) -> None:
    result = outcomes(shared_prompt(per_s, count=700, seed=21))
    by_hits = sorted(result, key=lambda name: result[name].hit_rate)
    hashed, groups, predicted = result["prefix_hash"], result["affinity_groups"], result["predicted_ttft"]
    assert hashed.hit_rate >= result[by_hits[-1]].hit_rate - 0.01
    assert hashed.imbalance > 4
    assert groups.hit_rate > hashed.hit_rate - 0.06
    assert groups.hit_rate > result["least_loaded"].hit_rate + 0.03
    assert groups.imbalance < 1.5
    assert predicted.mean_ttft_s <= 1.01 * min(outcome.mean_ttft_s for outcome in result.values())
    assert predicted.hit_rate > hashed.hit_rate - 0.02


@pytest.mark.parametrize("per_s", [80.0, 250.0])
def test_tenants_with_conversations(per_s: float) -> None:
    results = [outcomes(tenant_chat(per_s, count=800, seed=seed)) for seed in (22, 122, 222)]
    means = {name: sum(result[name].mean_ttft_s for result in results) for name in POLICY_NAMES}
    assert means["predicted_ttft"] <= 1.01 * min(means.values())
    result = results[0]
    predicted = result["predicted_ttft"]
    assert predicted.hit_rate > result["least_loaded"].hit_rate + 0.15
    assert predicted.hit_rate > result["prefix_hash"].hit_rate - 0.02
    assert result["affinity_groups"].hit_rate > result["least_loaded"].hit_rate + 0.1


def test_a_burst_of_new_prefixes_needs_speculation() -> None:
    arrivals = burst(seed=23)
    with_it = Fleet(make_policy("predicted_ttft")).run(arrivals)
    without = Fleet(make_policy("predicted_ttft"), speculation=False).run(arrivals)
    assert with_it.hit_rate > without.hit_rate + 0.2
    assert with_it.mean_ttft_s < without.mean_ttft_s / 2
    others = outcomes(arrivals, ("round_robin", "least_loaded", "prefix_hash", "bounded_hash", "affinity_groups"))
    assert with_it.mean_ttft_s < 1.01 * min(outcome.mean_ttft_s for outcome in others.values())


@pytest.mark.parametrize("per_s", [60.0, 100.0, 170.0])
def test_nothing_shared(per_s: float) -> None:
    predicted = loaded = 0.0
    for seed in (24, 25):
        result = outcomes(nothing_shared(per_s, seed=seed), ("least_loaded", "predicted_ttft"))
        predicted += result["predicted_ttft"].mean_ttft_s
        loaded += result["least_loaded"].mean_ttft_s
    assert predicted <= 1.03 * loaded


@pytest.mark.parametrize("name", ["affinity_groups", "predicted_ttft"])
def test_pods_that_report_nothing(name: str) -> None:
    """SpeculativeEntries and observed times replace reports, as with engines that are not ours."""
    arrivals = tenant_chat(250.0, seed=27)
    blind = Fleet(make_policy(name), reports=False).run(arrivals)
    baseline = Fleet(make_policy("least_loaded"), reports=False).run(arrivals)
    assert blind.mean_ttft_s < baseline.mean_ttft_s
    assert blind.hit_rate > baseline.hit_rate + 0.1


def test_a_popular_prefix_is_copied_to_more_pods_than_one_request_would_pay_for() -> None:
    arrivals = shared_prompt(100.0, seed=28)
    outcome = Fleet(make_policy("predicted_ttft")).run(arrivals)
    assert outcome.imbalance < 1.4


def test_the_same_traffic_gives_the_same_outcome() -> None:
    arrivals = shared_prompt(100.0, count=200)
    for name in POLICY_NAMES:
        first, second = (Fleet(make_policy(name, PolicyOptions())).run(arrivals) for _ in range(2))
        assert first == second
