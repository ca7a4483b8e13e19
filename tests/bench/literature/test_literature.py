"""The tables of the literature: the level at which something begins to pay off, the files, and the published shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.simulate.scenario import play
from tests.bench.literature.cases import (
    KINDS,
    NO_CACHE,
    SHAPE_ARMS,
    SHARING_LEVELS,
    WORKLOAD_ARMS,
    shape,
    without_caching,
)
from tests.bench.literature.files import save
from tests.bench.literature.run import Measured, Row, Tables, measured, pays_from


def numbers(throughput: float = 1.0) -> Measured:
    return Measured(0.5, 2.0, 1.5, 100.0, 200.0, throughput, 3)


def tables(gains: dict[str, list[float]]) -> Tables:
    """Return tables; `gains`: throughput of an arm by level."""
    sharing = tuple(
        Row(f"{level:g}", arm, (numbers(gains.get(arm, [100.0] * 7)[i]),))
        for i, level in enumerate(SHARING_LEVELS)
        for arm in WORKLOAD_ARMS
    )
    workloads = tuple(Row(kind.name, arm, (numbers(),)) for kind in KINDS for arm in WORKLOAD_ARMS)
    first = tuple(Row("", arm, (numbers(),)) for arm in SHAPE_ARMS)
    return Tables((1,), first, workloads, {kind.name: 2.0 for kind in KINDS}, sharing)


@pytest.mark.parametrize(
    ("throughput", "expected"),
    [
        ([100.0] * 7, None),
        ([102.0] * 7, 0.0),
        ([100, 100, 104, 110, 120, 130, 140], 0.175),
        ([100, 103, 101, 110, 120, 130, 140], 0.25 + 0.25 * 1 / 9),
        ([100, 103, 104, 110, 120, 130, 101], None),
    ],
)
def test_something_pays_from_the_level_on_above_which_it_always_does(
    throughput: list[float], expected: float | None
) -> None:
    found = pays_from(tables({"predicted_ttft": throughput}), "predicted_ttft", "round_robin")
    assert found == (None if expected is None else pytest.approx(expected))


def test_files_say_the_same(tmp_path: Path) -> None:
    paths = save(tables({"predicted_ttft": [100, 100, 104, 110, 120, 130, 140]}), tmp_path)
    assert [path.name for path in paths] == ["literature.md", "literature.json", "literature.html"]
    text, page = paths[0].read_text(), paths[2].read_text()
    assert "| 50% | 100.0 | 100.0 | 110.0 | +0.0% | +10.0% |" in text
    assert "against round_robin) once 17% of a prompt is shared" in text
    assert "17% of a prompt is shared" in page
    assert page.count("<svg") == 2
    assert "http://" not in page.replace("http://www.w3.org", "")
    content = json.loads(paths[1].read_text())
    assert len(content["sharing"]) == len(SHARING_LEVELS) * len(WORKLOAD_ARMS)
    assert "c1_ms 0.022" in content["profile"]


def test_the_published_shape_comes_out() -> None:
    found = {arm: measured(play(shape(1, 260), arm)) for arm in ("prefix_hash", "affinity_groups", "round_robin")}
    hashed, groups, robin = found["prefix_hash"], found["affinity_groups"], found["round_robin"]
    assert hashed.hit_rate >= max(groups.hit_rate, robin.hit_rate)
    assert hashed.load_imbalance > 6
    assert groups.hit_rate > hashed.hit_rate - 0.03
    assert groups.load_imbalance < hashed.load_imbalance / 3
    # The prompt's group is six pods, yet all eight serve it: before there are groups, three requests with this prompt
    # in a row make it look like the only prompt, and each pod that then holds it continues to serve it. Round robin
    # does not balance the load.
    assert hashed.prefix_pods == 1 < groups.prefix_pods
    assert groups.load_imbalance < robin.load_imbalance


def test_pods_without_caching_reuse_nothing() -> None:
    assert WORKLOAD_ARMS[0] == NO_CACHE
    found = measured(play(without_caching(shape(1, 60)), "round_robin"))
    assert found.hit_rate == 0
