"""The table of shadow policies: acting policies are unchanged and agree with themselves; each figure is in its cell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadgen.measure.records import RequestRecord
from loadgen.simulate.arms import make_router
from loadgen.simulate.fleet import Simulation
from router.routing.policies import POLICY_NAMES
from tests.bench.fleet.bench_shadow import ACTING, CASES, play, table
from tests.bench.policy_table.cases import KNEES
from tests.bench.policy_table.run import STRIDE

CASE = replace(CASES["multi_60"], requests=12)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_acts_is_bit_equal_to_the_policy_table_and_agrees_with_its_own_shadow(name: str) -> None:
    records, seen = play(CASE, name, POLICY_NAMES, seed=1)
    knee, alone = KNEES[CASE.knee_of], list[RequestRecord]()
    simulation = Simulation(
        CASE.fleet(knee), CASE.workload(1), CASE.arrivals(knee), sessions=12, seed=1, on_record=alone.append
    )
    simulation.run([make_router(name, simulation, 1000, STRIDE)])
    assert records == alone
    own = seen[name]
    assert own.others == 0
    assert own.shadow_tokens == own.acting_tokens
    assert {counted.acting_tokens for counted in seen.values()} == {own.acting_tokens}
    assert len({counted.shadow_tokens for counted in seen.values()}) > 1
    assert {counted.requests for counted in seen.values()} == {len(records)}
    assert {counted.prompt_tokens for counted in seen.values()} == {sum(record.prompt_tokens for record in records)}


def test_figures_stand_where_they_belong() -> None:
    rows = {line.split("|")[1].strip(" `"): line.split("|")[2:-1] for line in table(CASE, seed=1).splitlines()[2:]}
    assert list(rows) == list(POLICY_NAMES)
    for column, acting in enumerate(ACTING, start=2):
        _, seen = play(CASE, acting, POLICY_NAMES, seed=1)
        assert rows[acting][column].strip() == "-"
        for name in set(POLICY_NAMES) - {acting}:
            part = seen[name].shadow_tokens / seen[name].prompt_tokens
            others = 100 * seen[name].others / seen[name].requests
            assert rows[name][column].strip() == f"{part:.2f} ({others:.0f} %)"
    for name, cells in rows.items():
        records, seen = play(CASE, name, (name,), seed=1)
        cached = sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records)
        believed = seen[name].acting_tokens / seen[name].prompt_tokens
        assert [cell.strip() for cell in cells[:2]] == [f"{cached:.2f}", f"{believed:.2f}"]
