"""Each peer follows its published formula, in situations small enough to compute by hand."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport
from loadgen.simulate.arms import PEERS
from loadgen.simulate.peers.aibrix import EVICTION_S, AibrixPrefixCache
from loadgen.simulate.peers.base import Peer
from loadgen.simulate.peers.dynamo import DynamoKv
from loadgen.simulate.peers.hashing import KubeAi, PowerOfTwo
from loadgen.simulate.peers.llmd import LlmDApproximate, LlmDPrecise
from loadgen.simulate.peers.preble import PrebleE2
from loadgen.simulate.peers.sglang import SglangCacheAware, SmgLeastLoad
from loadgen.simulate.pods.pod import Report
from loadgen.simulate.pods.routing import Scrape
from tests.loadgen.simulate.hand_made import offered

A, B, C = "pod-a", "pod-b", "pod-c"


def fresh(kind: type[Peer], *pods: str) -> Peer:
    peer = kind(1)
    peer.pods_changed(pods or (A, B), 0.0)
    return peer


def busy(peer: Peer, pod: str, count: int, first: int = 1000, tokens: int = 64) -> None:
    """Send `count` unique requests to the pod; they stay in flight."""
    others = [other for other in peer.pods if other != pod]
    for number in range(first, first + count):
        assert peer.choose(offered(number, [number], tokens), others, 0.0) == pod


def send(peer: Peer, number: int, keys: list[int], pod: str, now_s: float = 0.0) -> None:
    """Send a request to the pod, whatever the peer would choose, and end it."""
    request = offered(number, keys)
    assert peer.choose(request, [other for other in peer.pods if other != pod], now_s) == pod
    peer.ended(request, pod, now_s, completed=True)


def held(*keys: int) -> Report:
    return Report((), tuple(map(PrefixKey, keys)), LoadReport())


@pytest.mark.parametrize("kind", PEERS.values(), ids=lambda kind: kind.name)
def test_books_are_balanced_and_excluded_pods_are_left_out(kind: type[Peer]) -> None:
    peer = fresh(kind, A, B, C)
    requests = [offered(number, [number % 3, 10 + number]) for number in range(40)]
    pods = [peer.choose(request, [B], 0.1 * request.number) for request in requests]
    assert B not in pods
    assert sum(peer.in_flight.values()) == len(peer.sent) == 40
    for request, pod in zip(requests, pods, strict=True):
        assert pod is not None
        peer.first_token(request, pod, 0, 5.0)
        peer.ended(request, pod, 6.0, completed=True)
    assert set(peer.in_flight.values()) == {0}
    assert not peer.sent
    assert peer.choose(offered(99), [A, B, C], 7.0) is None


def test_sglang_follows_a_match_of_over_30_percent_and_else_the_least_loaded() -> None:
    peer = fresh(SglangCacheAware)
    send(peer, 1, [1, 2, 3, 4], A)
    busy(peer, A, 5)
    assert peer.choose(offered(2, [1, 2, 3, 70, 71, 72, 73, 74, 75]), [], 1.0) == A, "3 of 9: 33 %"
    assert peer.choose(offered(3, [1, 2, 3, 70, 71, 72, 73, 74, 75, 76]), [], 1.0) == A, "9 of 10 since then"
    assert peer.choose(offered(4, [1, 2, 3, 80, 81, 82, 83, 84, 85, 86]), [], 1.0) == B, "3 of 10 is not over 30 %"


def test_sglang_drops_affinity_only_if_both_thresholds_are_passed() -> None:
    peer = fresh(SglangCacheAware)
    send(peer, 1, [1, 2], A)
    busy(peer, B, 130, first=5000)
    busy(peer, A, 194, first=7000)
    assert peer.choose(offered(2, [1, 2]), [], 1.0) == A, "64 more, not above 64"
    assert peer.choose(offered(3, [1, 2]), [], 1.0) == A, "65 more, but 195 is exactly 1.5 x 130"
    assert peer.choose(offered(4, [1, 2]), [], 1.0) == B, "66 more and 196 > 195"


def test_sglang_gives_a_tie_to_the_worker_that_was_sent_the_fewest() -> None:
    peer = fresh(SglangCacheAware, A, B, C)
    chosen = []
    for number in range(7):
        pod = peer.choose(offered(number, [100 * number]), [], 1.0)
        assert pod is not None
        chosen.append(pod)
        peer.ended(offered(number, [100 * number]), pod, 2.0, completed=True)
    assert chosen == [A, B, C, A, B, C, A]


def test_smg_adds_queue_tokens_and_kv_pressure() -> None:
    peer = fresh(SmgLeastLoad)
    for pod, waiting in ((A, 0), (B, 1)):
        peer.scraped(pod, Scrape(0, waiting, 0.0), 0.0)
    busy(peer, A, 1, tokens=1000)
    assert peer.choose(offered(1, tokens=500), [], 1.0) == A, "1,000 tokens against one waiting request of 1,024"
    assert peer.choose(offered(2, tokens=1), [], 1.0) == B, "1,500 against 1,024"
    full = fresh(SmgLeastLoad)
    for pod, kv in ((A, 0.9), (B, 0.0)):
        full.scraped(pod, Scrape(0, 0, kv), 0.0)  # A's KV costs 0.15 x 0.9 / (1 - 0.9) = 1.35 s, as 2,700 tokens do
    busy(full, B, 1, tokens=2600)
    assert full.choose(offered(1, tokens=1), [], 1.0) == B
    busy(full, B, 1, first=2000, tokens=200)
    assert full.choose(offered(2, tokens=1), [], 1.0) == A


def test_smg_counts_what_it_sent_until_the_next_poll_alone() -> None:
    peer = fresh(SmgLeastLoad)
    assert {peer.choose(offered(n, tokens=5000), [], 0.0) for n in range(2)} == {A, B}, (
        "fewest requests before any poll"
    )
    peer.scraped(A, Scrape(1, 0, 0.0), 1.0)
    peer.scraped(B, Scrape(0, 0, 0.1), 1.0)
    assert peer.choose(offered(2, tokens=10), [], 1.0) == A, "by the poll, A's request runs and none waits"
    late = fresh(SmgLeastLoad)
    late.scraped(A, Scrape(0, 9, 0.0), 0.0)
    busy(late, B, 1)
    assert late.choose(offered(2, tokens=1), [], 0.0) == A, (
        "a pod without a report counts as the best one plus its own requests"
    )


def test_dynamo_adds_prefill_until_the_first_token_and_blocks_until_the_end() -> None:
    peer = fresh(DynamoKv)
    peer.reported(B, held(1, 2, 3, 4), 0.0)
    first = offered(1, [1, 2, 3, 4])
    assert peer.choose(first, [], 0.0) == B, "prefill credited"
    # B now costs 16 blocks of decode; the credit covered its whole prefill. A new request of 16 blocks costs A 16 + 16.
    assert peer.choose(offered(2, [50, 51, 52, 53]), [], 0.0) == A
    # A now costs 32 (prefill 16 + decode 16), B 16 (decode). A new request adds 32 to either.
    assert peer.choose(offered(3, [60, 61, 62, 63]), [], 0.0) == B
    # A costs 32, B costs 48 (prefill 16 of request 3 + decode 32). The first token of request 2 takes 16 from A.
    peer.first_token(offered(2), A, 0, 0.1)
    assert peer.choose(offered(4, [70, 71, 72, 73]), [], 0.2) == A, "A: 16 after its first token"
    peer.ended(first, B, 0.3, completed=True)
    peer.first_token(offered(3), B, 0, 0.3)
    assert peer.choose(offered(5, [80]), [], 0.4) == B, "A: 16 + 32, B: 16"


def test_dynamo_counts_a_block_that_requests_share_once() -> None:
    peer = fresh(DynamoKv)
    shared = [offered(n, [1, 2, 3, 4]) for n in range(3)]
    for request in shared:
        assert peer.choose(request, [B], 0.0) == A
        peer.first_token(request, A, 0, 0.0)
    busy(peer, B, 1)
    fifth = offered(9, [80, 81, 82, 83, 84])
    assert peer.choose(fifth, [A], 0.0) == B
    peer.first_token(fifth, B, 0, 0.0)
    # A holds 16 blocks, not 48; B holds 24, including the one key of its first request.
    assert peer.choose(offered(10, [90]), [], 0.1) == A
    peer.ended(offered(10, [90]), A, 0.2, completed=True)
    peer.ended(shared[0], A, 0.2, completed=True)
    peer.ended(shared[1], A, 0.2, completed=True)
    peer.reported(B, held(1, 2, 3, 4), 0.2)
    peer.reported(A, held(1, 2, 3, 4), 0.2)
    assert peer.choose(offered(11, [1, 2, 3, 4]), [], 0.3) == A, "A: 16, and no new blocks; B: 24 + 16"


def test_dynamo_knows_nothing_of_its_own_choices_before_events() -> None:
    peer = fresh(DynamoKv, A, B)
    prompt = [1, 2, 3, 4]
    assert {peer.choose(offered(n, prompt), [], 0.0) for n in range(2)} == {A, B}


@pytest.mark.parametrize(("kind", "expected"), [(LlmDApproximate, B), (LlmDPrecise, B)])
def test_llmd_weighs_queue_against_a_partial_match(kind: type[Peer], expected: str) -> None:
    peer = fresh(kind)
    send(peer, 1, [1], A)
    peer.scraped(A, Scrape(1, 9, 0.0), 0.0)
    peer.scraped(B, Scrape(1, 3, 0.0), 0.0)
    # Scores are prefix + queue + KV. With weights 3, 2, 2: A has 3/4 + 0 + 2, B has 0 + 2 + 2. With weights 2, 1, 1: A
    # has 2/4 + 0 + 1, B has 0 + 1 + 1.
    assert peer.choose(offered(2, [1, 70, 71, 72]), [], 0.0) == expected


def test_llmd_322_prefers_a_whole_match_to_the_shortest_queue_and_211_as_well() -> None:
    for kind in (LlmDApproximate, LlmDPrecise):
        peer = fresh(kind)
        send(peer, 1, [1, 2, 3, 4], A)
        peer.scraped(A, Scrape(1, 9, 0.2), 0.0)
        peer.scraped(B, Scrape(1, 3, 0.0), 0.0)
        # Scores are prefix + queue + KV. With weights 3, 2, 2: A has 3 + 0 + 1.6 = 4.6, B has 0 + 2 + 2. With weights
        # 2, 1, 1: A has 2 + 0 + 0.8 = 2.8, B has 0 + 1 + 1.
        assert peer.choose(offered(2, [1, 2, 3, 4]), [], 0.0) == A


def test_llmd_211_forgets_what_it_sent_after_two_seconds_unless_events_confirm() -> None:
    for confirmed, expected in ((False, {A, B}), (True, {A})):
        peer = fresh(LlmDPrecise)
        send(peer, 1, [1, 2], A)
        if confirmed:
            peer.reported(A, held(1, 2), 0.1)
        chosen = set()
        for number in range(2, 40):
            later = 10.0 * number
            request = offered(number, [1, 2])
            chosen.add(pod := peer.choose(request, [], later))
            peer.ended(request, pod or "", later, completed=True)
        assert chosen == expected


def test_kubeai_looks_at_25_tokens_of_the_first_user_message_only() -> None:
    peer = fresh(KubeAi, A, B, C)
    homes = {}
    for start in range(0, 4000, 100):
        request = offered(start, tokens=25, first_token=start)
        homes[start] = peer.choose(request, [], 0.0)
        peer.ended(request, homes[start] or "", 0.0, completed=True)
        longer = offered(start + 1, tokens=60, first_token=start)
        assert peer.choose(longer, [], 0.0) == homes[start]
        peer.ended(longer, homes[start] or "", 0.0, completed=True)
    assert set(homes.values()) == {A, B, C}


def test_kubeai_bound_is_125_percent_of_the_mean_with_the_new_request_counted() -> None:
    peer = fresh(KubeAi, A, B)
    home = peer.choose(offered(1, tokens=100), [], 0.0)
    # With 1 and 0 in flight, the bound is (1 + 1) / 2 x 1.25 = 1.25, so the home still takes one.
    assert peer.choose(offered(2, tokens=100), [], 0.0) == home
    # With 2 and 0, the bound is 3 / 2 x 1.25 = 1.875, so it does not.
    assert peer.choose(offered(3, tokens=100), [], 0.0) != home
    # With 2 and 1, the bound is 4 / 2 x 1.25 = 2.5, so it does.
    assert peer.choose(offered(4, tokens=100), [], 0.0) == home


def test_aibrix_follows_the_prefix_until_8_requests_apart() -> None:
    peer = fresh(AibrixPrefixCache)
    send(peer, 1, [1, 2], A)
    busy(peer, A, 8)
    busy(peer, B, 1, first=3000)
    # With 8 and 1 requests, the limit is the mean 4.5 + one deviation 3.5 = 8, so A is within it.
    assert peer.choose(offered(2, [1, 2]), [], 1.0) == A
    # With 9 and 1, they are 8 apart, and the limit is 5 + 4 = 9.
    assert peer.choose(offered(3, [1, 2]), [], 1.0) == A
    # With 10 and 1, they are 9 apart.
    assert peer.choose(offered(4, [1, 2]), [], 1.0) == B


def test_aibrix_takes_the_next_best_match_within_a_deviation_and_forgets_after_20_minutes() -> None:
    peer = fresh(AibrixPrefixCache, A, B, C)
    send(peer, 1, [1, 2, 3, 4], A)
    send(peer, 2, [1, 2], B)
    busy(peer, A, 6)
    # With 6, 0 and 0 requests, the limit is the mean 2 + the deviation 2.83 = 4.83, so A is beyond it.
    assert peer.choose(offered(3, [1, 2, 3, 4]), [], 1.0) == B
    late = fresh(AibrixPrefixCache)
    send(late, 1, [1, 2], A)
    busy(late, A, 1, first=4000)
    send(late, 2, [9], B, now_s=EVICTION_S + 1)
    assert late.choose(offered(5, [1, 2]), [], EVICTION_S + 1) == A, "A's own table is pruned when A is sent something"
    send(late, 6, [9], A, now_s=2 * EVICTION_S + 3)
    assert late.choose(offered(7, [1, 2]), [], 2 * EVICTION_S + 3) == B


def test_preble_exploits_if_more_is_cached_than_missing() -> None:
    peer = fresh(PrebleE2)
    send(peer, 1, [1, 2, 3, 4], A)
    assert peer.choose(offered(2, [1, 2, 3, 70]), [], 1.0) == A, "3 cached, 1 missing"
    assert peer.choose(offered(3, [1, 2, 80, 81]), [], 1.0) == B, "2 and 2: the least load + prefill"


def test_preble_hands_over_if_the_holder_has_twice_the_load() -> None:
    peer: Any = fresh(PrebleE2)
    keys = list(range(1, 33))
    send(peer, 1, keys, A)
    assert peer.choose(offered(2, keys), [], 1.0) == A
    for number in range(3, 12):
        send(peer, number, [100 * number + i for i in range(32)], A)
    assert peer.choose(offered(20, keys), [], 1.0) == B
    assert peer.choose(offered(21, [*keys, 999]), [], 400.0) in (A, B), "after three minutes the load is forgotten"
    assert peer._load(A, 400.0) + peer._load(B, 400.0) == pytest.approx(peer._sums[A] + peer._sums[B])


def test_power_of_two_never_takes_the_busiest_of_three_and_sees_only_two() -> None:
    peer = fresh(PowerOfTwo, A, B, C)
    busy(peer, C, 50)
    busy(peer, B, 30, first=3000)
    chosen = []
    for number in range(60):
        request = offered(number)
        pod = peer.choose(request, [], 0.0)
        chosen.append(pod)
        peer.ended(request, pod or "", 0.0, completed=True)
    assert C not in chosen
    assert set(chosen) == {A, B}, "B if A was not among the two"
