"""Messages between simulated gateways are delayed as between real ones, in order, and the same each time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.simulate import peer_stream
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.peer_stream import PeerStream
from loadgen.simulate.pods.routing import Scrape
from loadgen.simulate.pods.timeline import Timeline
from router.peer_sync.messages import Life, PeerMessage
from router.peer_sync.pace import Pace, ReadPace


@dataclass
class Listener:
    """The part of a gateway that the stream uses."""

    chooser_name: str
    timeline: Timeline
    heard_s: list[tuple[float, float]] = field(default_factory=list)
    """When each message was sent, and when it was received."""
    numbers: list[int] = field(default_factory=list)

    def heard(self, message: PeerMessage, sent_at_s: float) -> None:
        self.heard_s.append((sent_at_s, self.timeline.now_s))
        self.numbers.append(message.seq)


def message(number: int) -> PeerMessage:
    return PeerMessage(Life(1), "gateway", number, 256)


def played(sent: Sequence[tuple[float, int]], gateways: int, *, seed: int = 1, scale: float = 1.0) -> list[Listener]:
    """Send each message, given as its time and the number of its gateway."""
    timeline = Timeline()
    listeners = [Listener(f"gateway-{number}", timeline) for number in range(gateways)]
    stream = PeerStream(timeline, cast(list[Gateway], listeners), seed=seed, scale=scale)
    for number, (at_s, by) in enumerate(sent):
        by_gateway, told = cast(Gateway, listeners[by % gateways]), message(number)
        timeline.at(at_s, lambda by_gateway=by_gateway, told=told: stream.append(by_gateway, told))  # type: ignore[misc]
    while timeline.step():
        pass
    return listeners


SENT = st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 3)), max_size=50)


@given(SENT, st.integers(2, 4), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_all_others_hear_each_message_once_and_those_of_one_gateway_in_order(
    sent: list[tuple[float, int]], gateways: int, scale: float
) -> None:
    for place, listener in enumerate(played(sorted(sent), gateways, scale=scale)):
        theirs = [number for number, (_, by) in enumerate(sorted(sent)) if by % gateways != place]
        assert sorted(listener.numbers) == theirs
        for other in range(gateways):
            by_other = [number for number in listener.numbers if sorted(sent)[number][1] % gateways == other]
            assert by_other == sorted(by_other)
        assert all(heard_s - sent_s >= scale * 2 * peer_stream.NETWORK_S for sent_s, heard_s in listener.heard_s)


def test_a_scale_of_zero_is_at_once() -> None:
    for listener in played([(0.01 * number, number) for number in range(20)], 2, scale=0.0):
        assert listener.heard_s
        assert all(heard_s == sent_s for sent_s, heard_s in listener.heard_s)


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    sent = [(0.01 * number, number) for number in range(20)]
    first, again, other = (played(sent, 3, seed=seed) for seed in (1, 1, 2))
    assert [listener.heard_s for listener in first] == [listener.heard_s for listener in again]
    assert [listener.heard_s for listener in first] != [listener.heard_s for listener in other]


def requests(rate: float, count: int, seed: int) -> list[tuple[float, int]]:
    """Return (time, gateway) of the messages of two gateways that report only where each request went."""
    rng, paces, now_s = random.Random(seed), [Pace(), Pace()], 0.0
    sent = []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        by = rng.randrange(2)
        at_s = paces[by].due_s(now_s, now_s, 2)
        paces[by].sent(at_s, 2, has_routed=True)
        sent.append((at_s, by))
    return sorted(sent)


def test_on_one_machine_it_takes_what_real_gateways_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench_peer_sync_late` measured delays of 0.6 ms at p10, 0.8 at p50, 3.0 at p90 and 4.5 at p99, with 49
    requests/s on two idle cores. Those gateways paused for 2.5 ms after each read. Here gateways send nothing else, so
    some reads come sooner."""
    monkeypatch.setattr(peer_stream, "NETWORK_S", 0.0)
    monkeypatch.setattr(ReadPace, "pause_s", lambda pace, now_s, gateways: 0.0025)
    late_s = sorted(
        heard_s - sent_s
        for seed in range(1, 6)
        for listener in played(requests(49.0, 500, seed), 2, seed=seed)
        for sent_s, heard_s in listener.heard_s
    )
    found = [1e3 * late_s[int(share * len(late_s))] for share in (0.1, 0.5, 0.9, 0.99)]
    for seen, real in zip(found, (0.6, 0.8, 3.0, 4.5), strict=True):
        assert real / 1.5 <= seen <= real * 1.5, found


def test_a_gateway_sees_by_their_metrics_what_it_did_not_send_to_pods_that_publish_nothing() -> None:
    timeline = Timeline()
    gateway = Gateway("predicted_ttft", timeline, stride=256, publishes=False)
    gateway.pods_changed(["pod-0", "pod-1"], 0.0)
    gateway.scrapes()
    gateway.scraped("pod-0", Scrape(5, 2, 0.9), 0.01)
    gateway.scraped("pod-of-before", Scrape(5, 2, 0.9), 0.01)
    seen = {pod.pod_id: pod.state.load(0.02) for pod in gateway._serving.listed}
    assert [(load.in_flight, load.kv_used) for load in seen.values()] == [(7, pytest.approx(0.9)), (0, 0.0)]
