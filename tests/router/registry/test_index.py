"""Cases that the model test does not reach: long-lived speculation, bounds, memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.events import Keys, Tier
from engine.contract.keys import PrefixKey, prefix_keys
from router.registry.index import Match, PrefixIndex
from router.views.types import PodId
from tests.walked import frozen, walked

POD, OTHER = PodId("pod-0"), PodId("pod-1")
HOUR_S = 3600.0


def chain(name: str, strides: int) -> Keys:
    return prefix_keys(name.encode().ljust(16) * strides, 0, 16)


def test_refuting_forgets_what_an_lru_cache_evicted_earlier() -> None:
    index = PrefixIndex()
    for at_s, name in enumerate(("oldest", "refuted", "newest")):
        index.speculate(POD, chain(name, 4), 100.0 * at_s, HOUR_S)
    index.speculate(POD, chain("refuted", 6), 300.0, HOUR_S)
    index.refute(POD, chain("refuted", 6), 1, 301.0)
    assert index.match(chain("oldest", 4), 302.0) == {}
    assert index.match(chain("refuted", 6), 302.0) == {POD: Match(1)}
    assert index.match(chain("newest", 4), 302.0) == {POD: Match(4)}


def test_refuting_one_of_a_burst_forgets_nothing_else() -> None:
    """The first requests with a new prefix run at the same time, so their misses say nothing about evictions."""
    index = PrefixIndex()
    index.speculate(POD, chain("settled", 4), 0.0, HOUR_S)
    for i in range(3):
        index.speculate(POD, chain("burst", 4), 100.0 + i, HOUR_S)
    index.refute(POD, chain("burst", 4), 0, 103.5)
    assert index.match(chain("settled", 4), 104.0) == {POD: Match(4)}
    assert index.match(chain("burst", 4), 104.0) == {}


def test_being_told_of_an_emptied_pod_takes_back_belief_and_no_report() -> None:
    index = PrefixIndex()
    index.apply(POD, (), (chain("reported", 3), (), ()))
    for pod in (POD, OTHER):
        index.speculate(pod, chain("early", 2), 1.0, HOUR_S)
    index.speculate(POD, chain("late", 2), 3.0, HOUR_S)
    for pod in (POD, OTHER):
        index.forget_until(pod, 2.0)
    assert index.match(chain("early", 2), 3.0) == {}
    assert index.match(chain("late", 2), 3.0) == {POD: Match(2)}
    index.forget_until(POD, 4.0)
    assert index.match(chain("late", 2), 4.0) == {}
    assert index.match(chain("reported", 3), 4.0) == {POD: Match(3)}


def test_refuting_what_was_confirmed_meanwhile_changes_nothing() -> None:
    index = PrefixIndex()
    index.speculate(POD, chain("a", 3), 0.0, 5.0)
    index.apply(POD, (), (chain("a", 3), (), ()))
    index.refute(POD, chain("a", 3), 0, 1.0)
    assert index.match(chain("a", 3), 1.0) == {POD: Match(3)}


def test_retracting_leaves_what_other_requests_vouch_for() -> None:
    index = PrefixIndex()
    index.speculate(POD, chain("a", 2), 0.0, HOUR_S)
    index.speculate(POD, chain("a", 5), 1.0, HOUR_S)
    index.retract(POD, chain("a", 5))
    assert index.match(chain("a", 5), 2.0) == {POD: Match(2)}


def test_speculation_is_bounded_and_drops_the_longest_unused_tail_first() -> None:
    index = PrefixIndex(speculative_limit=10)
    for at_s, name in enumerate("abc"):
        index.speculate(POD, chain(name, 4), float(at_s), HOUR_S)
    assert index.statistics().speculative == 10
    assert [index.match(chain(name, 4), 3.0)[POD].strides for name in "abc"] == [2, 4, 4]
    index.speculate(POD, chain("long", 30), 3.0, HOUR_S)
    assert index.match(chain("long", 30), 3.0) == {POD: Match(10)}


def test_a_full_speculation_makes_room_for_several_requests_at_once() -> None:
    """In a dict that is emptied from its front, finding the oldest entry is slow, so the index does it rarely."""
    index = PrefixIndex(speculative_limit=640)
    sizes = []
    for i in range(200):
        index.speculate(POD, chain(f"request {i}", 4), float(i), HOUR_S)
        sizes.append(index.statistics().speculative)
    assert max(sizes) <= 640
    assert min(sizes[160:]) == 630
    assert [index.match(chain(f"request {i}", 4), 200.0) for i in (0, 199)] == [{}, {POD: Match(4)}]


@given(now_s=st.floats(0, 1e6), ttl_s=st.floats(0.01, 600))
def test_speculation_lives_at_least_as_long_as_asked_for_and_hardly_longer(now_s: float, ttl_s: float) -> None:
    index = PrefixIndex()
    index.speculate(POD, chain("a", 2), now_s, ttl_s)
    assert index.match(chain("a", 2), now_s + 0.999 * ttl_s) == {POD: Match(2)}
    assert index.match(chain("a", 2), now_s + ttl_s + 0.0626) == {}
    assert index.statistics().speculative == 0


def test_tiers_are_counted_within_the_match_alone() -> None:
    index = PrefixIndex()
    keys = chain("a", 6)
    index.apply(POD, (), (keys[:2], keys[2:3], keys[3:4] + keys[5:]))
    index.apply(OTHER, (), ((), keys[:1], ()))
    assert index.match(keys, 0.0) == {POD: Match(4, 1, 1), OTHER: Match(1, 1, 0)}
    index.apply(POD, (), (keys[2:3], (), ()))
    assert index.match(keys, 0.0)[POD] == Match(4, 0, 1)
    assert index.held(POD)[Tier.DISK] == {keys[3], keys[5]}


def test_a_dropped_pod_is_gone_at_once_and_its_memory_after_sweeping() -> None:
    index = PrefixIndex()
    keys = chain("a", 3000)
    for pod in (POD, OTHER):
        index.apply(pod, (), (keys, (), ()))
    index.apply(POD, (), (chain("own", 3000), (), ()))
    index.drop(POD)
    assert index.match(keys, 0.0) == {OTHER: Match(3000)}
    assert len(index) == 6000
    pieces = 0
    while looked := index.sweep(500):
        assert looked < 1000
        pieces += 1
    assert pieces > 5
    assert len(index) == 3000
    assert index.match(keys, 0.0) == {OTHER: Match(3000)}


def test_slots_are_used_again_after_sweeping() -> None:
    """Otherwise every snapshot would widen every mask for ever."""
    index = PrefixIndex()
    for _ in range(100):
        index.replace(POD, (chain("a", 50), (), ()))
        index.sweep(1000)
    widest = max(mask.bit_length() for shard in index._shards for mask in shard.values())
    assert widest <= 12
    assert index.match(chain("a", 50), 0.0) == {POD: Match(50)}


def test_a_pod_that_returns_while_its_last_life_is_swept_keeps_its_new_keys() -> None:
    index = PrefixIndex()
    index.apply(POD, (), (chain("old", 2000), (), ()))
    index.drop(POD)
    index.sweep(300)
    index.apply(POD, (), (chain("old", 100), (), ()))
    index.drop(OTHER)
    while index.sweep(300):
        pass
    assert index.match(chain("old", 2000), 0.0) == {POD: Match(100)}
    assert len(index) == 100


def test_keys_at_the_ends_of_their_range_have_a_place() -> None:
    keys = (PrefixKey(0), PrefixKey(2**64 - 1))
    index = PrefixIndex()
    index.apply(POD, (), (keys, (), ()))
    assert index.match(keys, 0.0) == {POD: Match(2)}


def test_keys_are_nothing_that_the_garbage_collector_walks() -> None:
    """Gateways have a million keys, reported or speculative, and a collection stops the gateway."""
    with frozen():
        index = PrefixIndex()
        for i in range(300):
            index.apply(POD, (), (chain(f"reported {i}", 30), chain(f"host {i}", 3), ()))
            index.speculate(OTHER, chain(f"sent {i}", 30), float(i), HOUR_S)
            index.speculate(OTHER, chain(f"sent {i // 2}", 20), float(i), HOUR_S)
        assert len(index) == 300 * 63
        assert walked() < 500
