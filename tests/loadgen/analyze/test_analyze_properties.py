"""Properties of every analysis, whatever the prompts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loadgen.analyze.prompts import analysed, text, write_lines

PIECES = st.one_of(
    st.sampled_from([text("a", 60), text("b", 60), text("c", 15), "\n", "\n\n", '{"b": 1, "a": [2]}', "{[", "[1] "]),
    st.sampled_from(["2026-01-02T03:04:05Z", "Ada", "Beno", "17", "18", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"]),
    st.text(max_size=12),
)
CONTENT = st.one_of(
    st.lists(PIECES, max_size=5).map(" ".join),
    st.none(),
    st.lists(PIECES.map(lambda words: {"type": "text", "text": words}), max_size=2),
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": CONTENT}),
    min_size=1,
    max_size=3,
)
TOOLS = st.lists(st.fixed_dictionaries({"name": st.sampled_from("ab"), "x": PIECES}), max_size=2)
ROWS = st.one_of(
    st.fixed_dictionaries({"messages": MESSAGES}),
    st.fixed_dictionaries({"messages": MESSAGES, "tools": TOOLS}),
    st.fixed_dictionaries({"prompt": st.lists(PIECES, min_size=1, max_size=6).map("".join)}),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(ROWS, min_size=1, max_size=14), st.integers(1, 3))
def test_rates_are_consistent(tmp_path: Path, rows: list[dict[str, Any]], pods: int) -> None:
    path = write_lines(tmp_path / "log.jsonl", [{"prompt": "always there"}, *rows])
    found = analysed(path, cache_tokens=(64, 256), pods=pods)
    assert found.requests + found.skipped_lines == 1 + len(rows)
    blocks = [loss.hit_rate for loss in found.block_loss]
    assert found.hit_rate_exact is not None
    assert found.hit_rate_exact >= blocks[0] >= blocks[1] >= blocks[2] >= 0
    assert blocks[0] == pytest.approx(found.caches[-1].one_pod)
    small, large, infinite = found.caches
    assert small.one_pod <= large.one_pod <= infinite.one_pod
    for cache in found.caches:
        assert cache.one_pod <= cache.perfect_affinity <= infinite.one_pod + 1e-12
    assert 0 <= found.distinct_tokens <= found.prompt_tokens
    # A break is reported only if repairing it gains something.
    assert found.possible_hit_rate >= found.hit_rate
    assert bool(found.findings) == (found.possible_hit_rate > found.hit_rate)
    assert all(0.01 <= finding.cost_share <= 1 for finding in found.findings)
    assert found.recommendation.enable == (found.caches[0].perfect_affinity > found.recommendation.break_even_rate)
    assert found == analysed(path, cache_tokens=(64, 256), pods=pods)
