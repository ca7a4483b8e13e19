"""The load in metrics pages of both engines, in present and earlier releases. Hostile pages do no harm."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import MAX_REQUESTS
from router.fleet.metrics_page import MAX_LINES, Slots, narrow_query, read_page
from router.fleet.scrape_pace import LONGEST_PAUSE_S, LONGEST_PERIOD_S, PERIOD_S, SPARING, Pace, period_s
from router.fleet.targets import MAX_RANKS
from router.views.reported import Counts
from tests.router.fleet.pages import Load, gauge, histograms, sglang_page, vllm_page


@pytest.mark.parametrize("old", [False, True])
def test_vllm_of_today_and_of_before(old: bool) -> None:
    page = read_page(vllm_page([Load(3.0, 2.0, 0.25)], old=old))
    assert page is not None
    assert page.engine == "vllm"
    (rank,) = page.ranks.values()
    assert rank.counts == Counts(3, 2, 0.25)
    assert (rank.capacity_tokens, rank.block_tokens) == (640 * 32, 32)


@pytest.mark.parametrize("old", [False, True])
def test_sglang_of_today_and_of_before(old: bool) -> None:
    page = read_page(sglang_page([Load(3.0, 2.0, 0.25)], old=old, page_size=16))
    assert page is not None
    assert page.engine == "sglang"
    (rank,) = page.ranks.values()
    assert rank.counts == Counts(3, 2, 0.25)
    assert (rank.capacity_tokens, rank.block_tokens) == ((None, None) if old else (20_480, 16))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.floats(0, 1)), min_size=1, max_size=9))
def test_each_rank_has_its_own_load(loads: list[tuple[int, int, float]]) -> None:
    expected = {rank: Counts(*load) for rank, load in enumerate(loads)}
    for make in (vllm_page, sglang_page):
        page = read_page(make([Load(float(r), float(w), u) for r, w, u in loads]))
        assert page is not None
        assert {rank: each.counts for rank, each in page.ranks.items()} == expected
        whole = page.whole()
        assert whole.counts is not None
        assert whole.counts.running == sum(r for r, _, _ in loads)
        assert whole.counts.waiting == sum(w for _, w, _ in loads)
        assert whole.capacity_tokens == 20_480 * len(loads)


def test_ranks_are_numbered_over_all_nodes() -> None:
    page = read_page(vllm_page([Load(), Load()], first_rank=4))
    assert page is not None
    assert list(page.ranks) == [4, 5]


def test_ranks_without_a_request_yet_are_there() -> None:
    page = read_page(vllm_page([Load(), Load(2.0, 1.0), Load()], unused=[0, 2]))
    assert page is not None
    assert [each.counts for each in page.ranks.values()] == [None, Counts(2, 1, 0.0), None]
    assert page.whole().counts == Counts(2, 1, 0.0)
    fresh = read_page(vllm_page([Load(), Load()], unused=[0, 1]))
    assert fresh is not None
    assert list(fresh.ranks) == [0, 1]
    assert fresh.whole().counts is None


@pytest.mark.parametrize("old", [False, True])
def test_the_capacity_is_a_ranks_and_not_that_of_all(old: bool) -> None:
    page = read_page(vllm_page([Load()] * 4, old=old))
    assert page is not None
    assert {each.capacity_tokens for each in page.ranks.values()} == {640 * 32}
    assert page.whole().capacity_tokens == 4 * 640 * 32


def test_schedulers_of_one_rank_are_one() -> None:
    page = read_page(sglang_page([Load(3.0, 1.0), Load(2.0, 0.0)], tp=4))
    assert page is not None
    assert [each.counts and each.counts.running for each in page.ranks.values()] == [3, 2]


def test_the_last_state_of_the_adapters_counts() -> None:
    page = read_page(
        vllm_page([Load()], slots=[(1.7e9, 2, "sql", ""), (1.8e9, 2, "law,sql", "med"), (1.6e9, 2, "", "")])
    )
    assert page is not None
    assert page.slots == Slots(2, frozenset({"law", "sql"}), frozenset({"med"}))
    idle = read_page(vllm_page([Load()], slots=[(1.8e9, 4, "", "")]))
    assert idle is not None
    assert idle.slots == Slots(4, frozenset(), frozenset())


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0", "1e400", str(MAX_REQUESTS + 1), "nonsense", "", "0x10"])
def test_what_is_no_number_of_requests_is_not_said(value: str) -> None:
    page = read_page(vllm_page([Load(value, 2.0, 0.5)]))
    assert page is not None
    assert page.ranks[0].counts is None, "without a number of running requests there is no load"
    page = read_page(vllm_page([Load(2.0, value, 0.5)]))
    assert page is not None
    assert page.ranks[0].counts is None
    page = read_page(vllm_page([Load(2.0, 1.0, value)]))
    assert page is not None
    assert page.ranks[0].counts == Counts(2, 1, None)


@pytest.mark.parametrize(("blocks", "size"), [(10**11, 10**5), (0, 32), (640, 0)])
def test_an_absurd_capacity_is_not_said(blocks: int, size: int) -> None:
    page = read_page(vllm_page([Load()], blocks=blocks, block_size=size))
    assert page is not None
    assert page.ranks[0].capacity_tokens is None


def test_a_line_that_is_cut_off_is_not_read() -> None:
    assert read_page(b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 1") is not None
    page = read_page(b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 1")
    assert page is not None
    assert page.ranks[0].counts is None
    assert read_page(b"vllm:num_requests_running 1") is None


def test_more_ranks_than_any_engine_has_and_lines_without_end_are_no_page() -> None:
    many = gauge("vllm:num_requests_running", [(f'engine="{i}"', 1.0) for i in range(MAX_RANKS + 1)])
    assert read_page(many.encode()) is None
    same = gauge("vllm:num_requests_running", [('engine="0"', 1.0)] * (MAX_LINES + 10))
    page = read_page((same + gauge("vllm:num_requests_waiting", [('engine="0"', 1.0)])).encode())
    assert page is not None
    assert page.ranks[0].counts == Counts(1, 1)


def test_pages_of_others_say_nothing() -> None:
    assert read_page(b"") is None
    assert read_page(histograms("other", ['x="1"'], 40).encode()) is None
    assert read_page(b"# HELP vllm:num_requests_running vllm:num_requests_running 3\n") is None


@given(st.binary(max_size=400))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    read_page(data)
    read_page(b"vllm:num_requests_running" + data + b"\n")
    read_page(b"vllm:num_requests_running 1\nvllm:lora_requests_info{" + data + b"} 1\nvllm:cache_config_info{" + data)


def test_labels_may_hold_anything() -> None:
    odd = 'model_name="a\\"}{ 9,engine=\\"7\\"",engine="1"'
    page = read_page(
        f"vllm:num_requests_running{{{odd}}} 3\nvllm:num_requests_waiting{{{odd}}} 4 1700000000\n".encode()
    )
    assert page is not None
    assert page.ranks == {1: page.ranks[1]}
    assert page.ranks[1].counts == Counts(3, 4)


def test_a_long_line_takes_no_longer_than_it_has_bytes() -> None:
    began_s = time.process_time()
    for line in (b"a" * 60_000, b'a="' + b"b" * 60_000, b'a="' + rb"\"" * 30_000, b"a=" * 30_000, b'a=""' * 15_000):
        read_page(b"vllm:cache_config_info{" + line + b"} 1\n")
    assert time.process_time() - began_s < 2.0


def test_the_narrow_query_names_what_changes() -> None:
    assert "vllm%3Anum_requests_running" in narrow_query("vllm")
    assert narrow_query("unknown") == ""


@given(took_s=st.floats(0, 100), pods=st.integers(0, 10**6))
def test_reading_takes_at_most_a_fiftieth_of_the_engines_time(took_s: float, pods: int) -> None:
    pace = Pace()
    pace.read(took_s, pods)
    assert pace.pause_s >= min(SPARING * took_s, LONGEST_PAUSE_S)
    assert PERIOD_S <= pace.pause_s <= LONGEST_PAUSE_S
    assert (pace.problem is not None) == (pace.pause_s > 2 * period_s(pods))


def test_failures_double_the_pause_up_to_a_bound_and_a_page_ends_that() -> None:
    pace = Pace()
    pauses = []
    for _ in range(9):
        pace.failed("no page", 8)
        pauses.append(pace.pause_s)
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    pace.read(0.001, 8)
    assert (pace.pause_s, pace.problem) == (PERIOD_S, None)


def test_large_fleets_are_read_less_often() -> None:
    assert period_s(1) == period_s(64) == PERIOD_S
    assert math.isclose(period_s(256), 2 * PERIOD_S)
    assert period_s(10**9) == LONGEST_PERIOD_S
