"""What is counted for viewers: hot prefixes, decisions, curves. Counting changes no decision and is bounded."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from router.forwarding.exchange import Arrival, Exchange
from router.operators.decision_log import KEPT, PER_S, SCORES_S_PER_S, SHOWN_SCORES, DecisionLog
from router.operators.history import POINTS, WINDOW, History
from router.operators.hot_prefixes import KEYS_PER_S, MOST_KEYS, WINDOW_S, HotPrefixes
from router.telemetry.answers import TTFB_BUCKETS_S
from router.telemetry.metrics import Metrics
from router.telemetry.totals import Totals
from router.views.types import PodScore
from tests.router.choosing.test_shadow import Step, World, steps

TOKENS = 64.0


def chain(prefix: int, strides: int, *tail: int) -> tuple[PrefixKey, ...]:
    """Return the keys of a prompt: `strides` of a shared prefix, then its own."""
    return tuple(PrefixKey(1_000_000 * (prefix + 1) + i) for i in range(strides)) + tuple(map(PrefixKey, tail))


# -- hot prefixes ---------------------------------------------------------------------------------------------------


@given(requests=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=60))
def test_a_prefix_is_found_to_its_last_key_with_its_share(requests: list[tuple[int, int, int]]) -> None:
    """Each prompt has one of some prefixes of different lengths, and after it nothing in common with other prompts."""
    hot, fresh = HotPrefixes(), count(10**12)
    lengths = [3, 8, 17, 40]
    for prefix, own, _ in requests:
        hot.add("m", chain(prefix, lengths[prefix], *[next(fresh) for _ in range(own)]), TOKENS, 0.0)
    found = {prefix.key: prefix for prefix in hot.hottest(10, 1.0)}
    for prefix, length in enumerate(lengths):
        times = sum(asked == prefix for asked, _, _ in requests)
        last = chain(prefix, length)[-1]
        if times >= 3:
            assert (found[last].strides, found[last].tokens) == (length, length * TOKENS)
            assert found[last].share == pytest.approx(times / len(requests))
        else:
            assert last not in found
    assert len(found) == sum(sum(asked == prefix for asked, _, _ in requests) >= 3 for prefix in range(4))


def test_a_prefix_and_the_longer_ones_that_part_its_traffic_are_all_shown() -> None:
    hot = HotPrefixes()
    for i in range(100):
        hot.add("m", chain(0, 10, *(5_000 + 10 * (i % 2) + j for j in range(5)), 10**9 + i), TOKENS, 0.0)
    shown = [(prefix.strides, prefix.share) for prefix in hot.hottest(10, 0.0)]
    assert shown == [(10, 1.0), (15, 0.5), (15, 0.5)]


def test_a_flood_of_prompts_that_come_once_neither_grows_it_nor_hides_a_hot_one() -> None:
    hot, fresh, now_s = HotPrefixes(), count(10**12), 0.0
    for i in range(6_000):
        now_s += WINDOW_S / 7_000
        hot.add("m", tuple(PrefixKey(next(fresh)) for _ in range(30)), TOKENS, now_s)
        if i % 20 == 0:
            hot.add("m", chain(0, 12), TOKENS, now_s)
    assert len(hot) <= 2 * MOST_KEYS + KEYS_PER_S
    assert [prefix.strides for prefix in hot.hottest(5, now_s)] == [12]


def test_it_counts_so_many_keys_a_second_and_no_more() -> None:
    hot = HotPrefixes()
    for i in range(100):
        hot.add("m", chain(i, 100_000), TOKENS, 0.5)
    assert len(hot) <= KEYS_PER_S
    hot.add("m", chain(1_000, 5), TOKENS, 1.6)
    assert len(hot) <= KEYS_PER_S + 5


def test_what_nobody_asks_for_any_more_is_gone_after_two_windows() -> None:
    hot = HotPrefixes()
    for _ in range(5):
        hot.add("m", chain(0, 4), TOKENS, 0.0)
    assert hot.hottest(5, WINDOW_S * 0.9)
    assert hot.hottest(5, WINDOW_S * 1.5)
    assert not hot.hottest(5, WINDOW_S * 3.1)


# -- decisions ------------------------------------------------------------------------------------------------------


def exchange(scores: tuple[PodScore, ...] = (), *, pod: str = "a", status: int = 200) -> Exchange:
    choice = SimpleNamespace(
        policy="predicted_ttft",
        pod=SimpleNamespace(pod_id=pod),
        cached_tokens=7,
        decision=SimpleNamespace(scores=scores, predicted_ttft_s=0.25),
    )
    made = Exchange(Arrival("id", 0.0, 100.0))
    made.inbound = cast(Any, SimpleNamespace(model="m", prompt_tokens=10))
    made.attempts = [cast(Any, SimpleNamespace(choice=choice, sent_s=1.0))]
    made.status, made.first_byte_s = status, 1.5
    return made


@given(arrivals=st.lists(st.tuples(st.floats(0, 0.3), st.booleans()), max_size=200))
def test_few_decisions_are_kept_of_each_second(arrivals: list[tuple[float, bool]]) -> None:
    log, now_s, ended = DecisionLog(), 0.0, []
    for pause_s, has_scores in arrivals:
        now_s += pause_s
        before = len(log.kept), log.kept[-1].number if log.kept else 0
        log.add(exchange((PodScore(cast(Any, "a"), 1.0),) if has_scores else ()), now_s)
        if log.kept and log.kept[-1].number != before[1]:
            ended.append(now_s)
    assert log.seen == len(arrivals)
    assert len(log.kept) <= KEPT
    for at_s in ended:  # a second of the log begins with the first request after the previous second
        assert sum(at_s <= other < at_s + 1.0 for other in ended) <= 2 * PER_S


@given(costs=st.lists(st.tuples(st.floats(0, 0.05), st.floats(0, 0.02)), min_size=1, max_size=300))
def test_scores_take_their_share_of_the_time_and_one_decision_more(costs: list[tuple[float, float]]) -> None:
    log, now_s, spent_s = DecisionLog(), 0.0, 0.0
    for pause_s, cost_s in costs:
        now_s += pause_s
        if log.wants_scores(now_s):
            log.scored(cost_s)
            spent_s += cost_s
    assert spent_s <= SCORES_S_PER_S * (now_s + 1.0) + 0.02


def test_the_chosen_pods_score_is_kept_however_bad() -> None:
    scores = tuple(PodScore(cast(Any, f"pod-{i:02}"), float(i)) for i in range(50))
    log = DecisionLog()
    log.add(exchange(scores, pod="pod-31"), 1.0)
    kept = [score.pod_id for score in log.kept[-1].scores]
    assert kept == [*(f"pod-{i:02}" for i in range(SHOWN_SCORES)), "pod-31"]
    decided = log.kept[-1]
    assert (decided.first_byte_s, decided.waited_s, decided.expected_ttft_s) == (0.5, 1.0, 0.25)


class Looker:
    """An observer that wants the scores of some decisions."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self.took = 0

    def wants_scores(self) -> bool:
        return self._draws.random() < 0.5

    def scored(self, seconds: float) -> None:
        self.took += 1

    def ended(self, exchange: Exchange) -> None: ...


@given(played=steps())
def test_watching_changes_no_decision(played: list[Step]) -> None:
    alone, watched = World(()), World(())
    watched.chooser.observer = looker = Looker(random.Random(1))
    scored = 0
    for number, step in enumerate(played):
        ours, theirs = alone.take(step, number), watched.take(step, number)
        scored += bool(theirs.decision.scores)
        theirs.decision.scores = ()
        assert (ours.pod.pod_id, ours.decision) == (theirs.pod.pod_id, theirs.decision)
    assert scored <= looker.took
    assert alone.state() == watched.state()


# -- curves ---------------------------------------------------------------------------------------------------------


@given(
    seconds=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(0, 1000), st.integers(0, 1000)),
        min_size=2,
        max_size=2 * WINDOW,
    )
)
def test_rates_and_shares_are_those_of_the_last_seconds(seconds: list[tuple[int, int, int, int]]) -> None:
    metrics, history = Metrics(), History()
    for second, (good, bad, prompt, cached) in enumerate(seconds):
        for status, times in ((200, good), (502, bad)):
            for _ in range(times):
                metrics.answers.answered("p", "a", status)
        metrics.decisions.cached("p", prompt_tokens=prompt, cached_tokens=min(prompt, cached), predicted_tokens=prompt)
        history.add(metrics.totals(), float(second), in_flight=1, waiting=2)
    last, window = history.points[-1], seconds[-WINDOW:] if len(seconds) > WINDOW else seconds[1:]
    assert last.answers_per_s == pytest.approx(sum(good + bad for good, bad, _, _ in window) / len(window))
    assert last.errors_per_s == pytest.approx(sum(bad for _, bad, _, _ in window) / len(window))
    assert history.engine_rates() == pytest.approx({"a": last.answers_per_s}) or not last.answers_per_s
    prompts = sum(prompt for _, _, prompt, _ in window)
    reused = sum(min(prompt, cached) for _, _, prompt, cached in window)
    assert last.hit_rate == (pytest.approx(reused / prompts) if prompts else None)
    assert last.expected_hit_rate == (1.0 if prompts else None)


@given(values=st.lists(st.floats(0, 200), min_size=1, max_size=50), quantile=st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], quantile: float) -> None:
    metrics = Metrics()
    metrics.answers.first_byte("p", 0.3)
    since = metrics.totals()
    for value in values:
        metrics.answers.first_byte("p", value)
    found = metrics.totals().first_byte_s(since, quantile)
    exact = sorted(values)[max(0, -int(-quantile * len(values) // 1) - 1)]
    bucket = bisect_left(TTFB_BUCKETS_S, exact)
    low = TTFB_BUCKETS_S[bucket - 1] if bucket else 0.0
    high = TTFB_BUCKETS_S[min(bucket, len(TTFB_BUCKETS_S) - 1)]
    assert found is not None
    assert low - 1e-9 <= found <= high + 1e-9
    assert metrics.totals().first_byte_s(metrics.totals(), 0.5) is None
    assert Totals().first_byte_s(Totals(), 0.5) is None


def test_the_curves_have_a_bound() -> None:
    history = History()
    for second in range(2 * POINTS):
        history.add(Totals(), float(second), in_flight=0, waiting=0)
    columns = history.columns()
    assert {len(values) for values in columns.values()} == {POINTS}
    assert columns["at_s"][-1] == 2 * POINTS - 1
