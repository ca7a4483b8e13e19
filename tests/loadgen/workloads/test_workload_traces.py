"""Traces: equal leading blocks are equal leading text, times are the file's, and one cache has the known reuse."""

from __future__ import annotations

import json
import os
import pickle
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.workloads.render import Renderer
from loadgen.workloads.traces import Trace, load_bailian, load_mooncake, spread
from tests.loadgen.workloads.lru import lru_hit_rate

PROMPTS = st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=30)


def mooncake(path: Path, *rows: tuple[int, int, list[int]]) -> Path:
    records = [{"timestamp": ms, "input_length": n, "output_length": 3, "hash_ids": ids} for ms, n, ids in rows]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_mooncake_prompts_share_the_text_of_leading_blocks(tmp_path: Path) -> None:
    rows = ((0, 1500, [0, 1, 2]), (3000, 1300, [0, 1, 5]), (3000, 1024, [7, 1]), (6000, 1500, [0, 1, 2]))
    trace = load_mooncake(mooncake(tmp_path / "t.jsonl", *rows), speedup=3.0)
    assert [trace.session(i).start_s for i in range(4)] == [0.0, 1.0, 1.0, 2.0]
    assert [sum(p.tokens for p in trace.session(i).turns[0].messages[0].pieces) for i in range(4)] == [
        1500,
        1300,
        1024,
        1500,
    ]
    assert [p.tokens for p in trace.session(0).turns[0].messages[0].pieces] == [512, 512, 476]
    texts = [Renderer(1.3).messages(trace.session(i), 0, {})[0]["content"] for i in range(4)]
    two_blocks = common(texts[0], texts[1])
    assert two_blocks / len(texts[0]) == pytest.approx(1024 / 1500, rel=0.05)
    assert common(texts[0], texts[2]) < 10
    assert texts[0] == texts[3]
    assert trace.about()["equal prompts"] == "1"
    assert [trace.session(i).group for i in range(4)] == ["block 1", "block 1", "block 1", "block 1"]


def test_tokens_without_a_block_are_the_requests_own(tmp_path: Path) -> None:
    trace = load_mooncake(mooncake(tmp_path / "t.jsonl", (0, 1500, [4, 5]), (0, 1500, [4, 5]), (0, 30, [])))
    pieces = [trace.session(i).turns[0].messages[0].pieces for i in range(3)]
    assert [[piece.tokens for piece in own] for own in pieces] == [[512, 512, 476], [512, 512, 476], [30]]
    assert pieces[0][:2] == pieces[1][:2]
    assert pieces[0][2] != pieces[1][2]
    assert trace.about()["equal prompts"] == "0"


def test_requests_are_in_order_of_time_whatever_the_files_order(tmp_path: Path) -> None:
    trace = load_mooncake(mooncake(tmp_path / "t.jsonl", (2000, 10, [1]), (500, 20, [2]), (500, 30, [3])))
    assert [trace.session(i).start_s for i in range(3)] == [0.0, 0.0, 1.5]
    assert list(trace.prompts()) == [(array("q", [2]), 20), (array("q", [3]), 30), (array("q", [1]), 10)]


def test_bailian_requests_belong_to_the_chat_their_parents_lead_to(tmp_path: Path) -> None:
    chats = ((5, -1), (6, 5), (7, 6), (8, 99), (9, 8))
    records = [
        {
            "chat_id": c,
            "parent_chat_id": p,
            "timestamp": i,
            "input_length": 40,
            "output_length": 2,
            "hash_ids": [c, 0, 1],
        }
        for i, (c, p) in enumerate(chats)
    ]
    path = tmp_path / "b.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    trace = load_bailian(path)
    assert [trace.session(i).group for i in range(5)] == ["chat 5", "chat 5", "chat 5", "chat 99", "chat 99"]
    assert [p.tokens for p in trace.session(0).turns[0].messages[0].pieces] == [16, 16, 8]
    assert [trace.session(i).start_s for i in range(5)] == [0, 1, 2, 3, 4]


def test_a_trace_travels_by_pickling_and_holds_no_text(tmp_path: Path) -> None:
    rows = [(i * 10, 5120, list(range(i, i + 10))) for i in range(300)]
    trace = load_mooncake(mooncake(tmp_path / "t.jsonl", *rows))
    data = pickle.dumps(trace)
    assert len(data) < 300 * (10 + 6) * 8 + 2000
    again: Trace = pickle.loads(data)
    assert [again.session(i) for i in range(300)] == [trace.session(i) for i in range(300)]
    with pytest.raises(IndexError):
        trace.session(300)


@given(times=st.lists(st.integers(0, 9).map(float), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_jitter_spreads_equal_times_until_the_next(times: list[float], seed: int) -> None:
    jittered = spread(array("d", times), seed)
    distinct = sorted(set(times))
    after = dict(zip(distinct, [*distinct[1:], float("inf")], strict=True))
    for time_s, moved_s in zip(times, jittered, strict=True):
        assert time_s <= moved_s < after[time_s]
        assert times.count(time_s) > 1 or moved_s == time_s
    for time_s in distinct:
        same = [moved for before, moved in zip(times, jittered, strict=True) if before == time_s]
        assert same == sorted(same)
    assert jittered == spread(array("d", times), seed)


def test_jitter_is_uniform() -> None:
    jittered = spread(array("d", [0.0] * 2000 + [10.0]), 1)
    assert sum(jittered[:2000]) / 2000 == pytest.approx(5.0, abs=0.3)
    assert sum(time_s < 2.5 for time_s in jittered) == pytest.approx(500, abs=100)


@given(prompts=PROMPTS, capacity=st.integers(1, 12))
def test_one_lru_cache_reuses_what_a_plain_model_of_it_reuses(prompts: list[list[int]], capacity: int) -> None:
    """In this model, blocks are prefixes, and a search over all blocks finds the least recently used."""
    used: dict[tuple[int, ...], int] = {}
    hits = clock = 0
    for ids in prompts:
        chain = [tuple(ids[: i + 1]) for i in range(len(ids))]
        hits += next((i for i, block in enumerate(chain) if block not in used), len(chain))
        for block in reversed(chain):
            clock += 1
            used[block] = clock
        while len(used) > capacity:
            del used[min(used, key=used.__getitem__)]
    rate = lru_hit_rate([(ids, 10 * len(ids)) for ids in prompts], 10, 10 * capacity)
    blocks = sum(map(len, prompts))
    assert rate.blocks == pytest.approx(hits / blocks if blocks else 0.0)
    assert rate.tokens == pytest.approx(rate.blocks)


@given(prompts=PROMPTS)
def test_more_capacity_never_reuses_less_and_an_unlimited_cache_most(prompts: list[list[int]]) -> None:
    sized = [(ids, max(0, 10 * len(ids) - 3)) for ids in prompts]
    rates = [lru_hit_rate(sized, 10, capacity).tokens for capacity in (10, 50, 100, 10_000, None)]
    assert rates == sorted(rates)
    assert rates[-1] == rates[-2]


def test_partial_blocks_count_the_tokens_they_have() -> None:
    rate = lru_hit_rate([([1, 2], 600), ([1, 2], 600), ([9, 2], 600)], 512, None)
    assert rate.tokens == pytest.approx(600 / 1800)
    assert rate.blocks == pytest.approx(2 / 6)


@pytest.mark.skipif("WARMROUTE_TRACES" not in os.environ, reason="WARMROUTE_TRACES names no folder with the traces")
@pytest.mark.parametrize(("name", "unlimited", "ratio"), [("conversation", 0.374, 0.37), ("synthetic", 0.651, 0.48)])
def test_mooncakes_published_traces_have_their_known_hit_rates(name: str, unlimited: float, ratio: float) -> None:
    """`unlimited`: hit rate of an unlimited cache. `ratio`: hit rate of a cache of 3M tokens / `unlimited`. The
    paper's figure 9 has ratios of 0.41 and 0.46."""
    trace = load_mooncake(Path(os.environ["WARMROUTE_TRACES"]) / f"{name}_trace.jsonl.gz")
    most = lru_hit_rate(trace.prompts(), 512, None).tokens
    assert most == pytest.approx(unlimited, abs=0.001)
    assert lru_hit_rate(trace.prompts(), 512, 3_000_000).tokens / most == pytest.approx(ratio, abs=0.005)
