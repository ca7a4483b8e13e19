"""The ablation: each part has a change that changes something, and ratios are paired by seed."""

from __future__ import annotations

import pytest

from router.routing.terms import DELAY_TERMS, REPLICATION_TERMS, TTFT_TERMS, adapter_s
from router.routing.ties import RULES, close_score
from tests.bench.policy_table.ablation import paired
from tests.bench.policy_table.changes import CHANGES
from tests.bench.policy_table.deciders import deciders

NAMES = [change.name for change in CHANGES]


def test_each_term_and_each_rule_has_a_change() -> None:
    parts = {*TTFT_TERMS, *DELAY_TERMS, *REPLICATION_TERMS, *RULES} - {adapter_s, close_score}
    assert {part.__name__ for part in parts} <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_each_change_changes_what_it_names_in_cases_that_exist() -> None:
    cases = {decider.name for decider in deciders(None)} | {"trace"}
    assert len(cases) == 8
    for change in CHANGES:
        assert change.patches or change.options
        assert set(change.cases) <= cases
        for owner, name, new in change.patches:
            before = getattr(owner, name)
            assert new(before) != before, change.name


def test_a_ratio_is_paired_by_seed() -> None:
    """The seeds differ tenfold, the change adds about a tenth to each."""
    whole = [1.0, 10.0, 2.0, 5.0, 3.0]
    ratio = paired([1.1 * number for number in whole], whole)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert ratio.decides
    assert not paired(whole, whole).decides
    assert not paired([1.0, 12.0, 1.8, 5.2, 3.1], whole).decides, "the interval has 1 in it"
