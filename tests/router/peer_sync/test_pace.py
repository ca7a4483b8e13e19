"""When gateways tell each other of requests: a request's pod at once, up to a rate; other news soon or in batches."""

from __future__ import annotations

import asyncio
import itertools
import math

import looptime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import prefix_keys
from router.peer_sync.codec import decode
from router.peer_sync.messages import Ended, Life, PeerMessage, Routed
from router.peer_sync.outbox import Outbox
from router.peer_sync.pace import (
    BURST,
    LINGER_S,
    REST_S,
    ROUTED_S,
    Pace,
    ReadPace,
    read_s,
    rest_s,
    routed_s,
)
from router.views.types import PodId
from tests.router.peer_sync.ends import End, ScriptedServer, ScriptedWire

POD = PodId("a")
KEYS = prefix_keys(b"a prompt", 0, 2)
ROUTED = Routed(0.0, 0, POD, KEYS, 9, 9, 9, "0" * 32)
GATEWAYS = st.integers(2, 1000)


def message_in(data: bytes) -> PeerMessage:
    message = decode(data)
    assert isinstance(message, PeerMessage)
    return message


def played(gaps_s: list[float], gateways: int) -> tuple[list[float], list[float]]:
    """Play requests with these gaps. Return how many seconds late each is told, and when messages are sent."""
    pace, late_s, sent_s = Pace(), list[float](), list[float]()
    waiting: list[float] = []
    now_s = 0.0
    for at_s in [*(sum(gaps_s[: i + 1]) for i in range(len(gaps_s))), math.inf]:
        while waiting and (due_s := max(now_s, pace.due_s(waiting[0], waiting[0], gateways))) < at_s:
            now_s = due_s
            late_s += [now_s - routed_s for routed_s in waiting]
            sent_s.append(now_s)
            pace.sent(now_s, gateways, has_routed=True)
            waiting.clear()
        now_s = at_s
        waiting.append(at_s)
    return late_s, sent_s


@given(st.lists(st.floats(0.0, 0.2), max_size=60), GATEWAYS)
def test_the_way_of_a_request_is_told_soon_and_messages_are_bounded(gaps_s: list[float], gateways: int) -> None:
    late_s, sent_s = played(gaps_s, gateways)
    assert len(late_s) == len(gaps_s)
    assert all(late <= routed_s(gateways) + 1e-9 for late in late_s)
    for i, first_s in enumerate(sent_s):
        for j in range(i, len(sent_s)):
            assert (j - i - BURST) * routed_s(gateways) <= sent_s[j] - first_s + 1e-6


@given(st.lists(st.floats(0.0, 1.0), max_size=60), GATEWAYS)
def test_what_comes_no_more_often_than_is_paid_for_is_told_at_once(gaps_s: list[float], gateways: int) -> None:
    late_s, _ = played([gap_s + routed_s(gateways) for gap_s in gaps_s], gateways)
    assert all(late <= 1e-9 for late in late_s)


def test_a_burst_is_told_at_once() -> None:
    late_s, _ = played([1.0] + [1e-4] * (BURST - 1), 4)
    assert max(late_s) <= 1e-9
    assert max(played([1.0] + [1e-4] * (BURST + 4), 4)[0]) > 0


@given(GATEWAYS)
def test_many_gateways_together_send_no_more_than_before(gateways: int) -> None:
    assert routed_s(gateways) <= rest_s(gateways)
    assert routed_s(gateways) == min(ROUTED_S * gateways, rest_s(gateways))
    assert rest_s(gateways) >= REST_S


@given(GATEWAYS, st.lists(st.floats(1e-5, 0.01), min_size=1, max_size=200))
def test_ends_are_told_early_only_while_ways_can_still_be_told_at_once(gateways: int, gaps_s: list[float]) -> None:
    pace, now_s, early, last_s = Pace(), 0.0, 0, -math.inf
    for gap_s in gaps_s:
        oldest_s, now_s = now_s, now_s + gap_s
        due_s = pace.due_s(oldest_s, None, gateways)
        assert due_s <= max(oldest_s + LINGER_S, last_s + rest_s(gateways)) + 1e-9, "no later than a batch is sent"
        if due_s <= now_s:
            early += now_s < last_s + rest_s(gateways)
            last_s = now_s
            pace.sent(now_s, gateways, has_routed=False)
        assert pace.due_s(None, now_s, gateways) <= now_s + 1e-9
    assert early <= BURST / 2 + 1 + now_s / routed_s(gateways)


def test_ends_wait_where_ways_take_all_messages() -> None:
    pace, now_s = Pace(), 1.0
    for _ in range(BURST):
        pace.sent(now_s, 4, has_routed=True)
    assert pace.due_s(now_s, None, 4) == pytest.approx(now_s + BURST / 2 * routed_s(4))


def test_a_notebook_knows_whether_a_way_is_to_be_told() -> None:
    outbox = Outbox(Life(1), "gateway-1", 256)
    heard: list[float] = []
    outbox.on_first = lambda: heard.append(0.0)
    outbox.ask(Life(2), 1.0)
    assert outbox.oldest_routed_s is None
    outbox.routed(ROUTED, 2.0)
    assert outbox.oldest_routed_s == 2.0
    assert len(heard) == 2, "a request's pod is told sooner than the question that waited"
    outbox.routed(ROUTED._replace(number=1), 3.0)
    assert outbox.oldest_routed_s == 2.0
    outbox.take(4.0)
    assert outbox.oldest_routed_s is None
    outbox.ended(ROUTED.number, 5.0)
    assert outbox.oldest_s == 5.0
    assert outbox.oldest_routed_s is None


@pytest.mark.parametrize("quiet_s", [0.0, 0.02, 1.0])
def test_a_gateway_tells_where_a_request_went_at_once_and_its_end_soon(quiet_s: float) -> None:
    """This holds whatever the gateway told before."""

    async def run() -> None:
        server = ScriptedServer()
        end = End(1, [POD], (ScriptedWire(server), ScriptedWire(server)))
        await end.start()
        try:
            await asyncio.sleep(1.0)
            end.route(POD, KEYS)
            await asyncio.sleep(quiet_s)
            clock = asyncio.get_running_loop().time
            number, routed_at_s = end.route(POD, KEYS), clock()
            ended_at_s = clock() + 0.003
            await asyncio.sleep(0.003)
            end.outbox.ended(number, ended_at_s)
            await asyncio.sleep(0.1)
            told = {
                type(event): at / 1e6 - server.ahead_s
                for at, data in server.entries
                for event in message_in(data).events
                if isinstance(event, Routed | Ended) and event.number == number
            }
            assert told[Routed] - routed_at_s < 0.004
            assert told[Ended] - ended_at_s < LINGER_S + 0.004, "more messages may be sent, so the end is told early"
        finally:
            await end.kill()

    loop = looptime.new_event_loop(noop_cycles=1)  # no sockets here
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def read(gaps_s: list[float], gateways: int) -> tuple[list[float], list[float]]:
    """Play messages with these gaps for a reader whose reads take no time. Return how many seconds late each is read,
    and when reads were answered."""
    pace, late_s, answered_s, reads_from_s = ReadPace(), list[float](), list[float](), -math.inf
    waiting = list(itertools.accumulate(gaps_s))
    while waiting:
        now_s = max(waiting[0], reads_from_s)
        late_s += [now_s - at_s for at_s in waiting if at_s <= now_s]
        waiting = [at_s for at_s in waiting if at_s > now_s]
        answered_s.append(now_s)
        reads_from_s = now_s + pace.pause_s(now_s, gateways)
    return late_s, answered_s


@given(st.lists(st.floats(0.0, 0.05), max_size=100), GATEWAYS)
def test_what_comes_is_read_soon_and_reads_are_bounded(gaps_s: list[float], gateways: int) -> None:
    late_s, answered_s = read(gaps_s, gateways)
    assert all(late <= read_s(gateways) + 1e-9 for late in late_s)
    for i, first_s in enumerate(answered_s):
        for j in range(i, len(answered_s)):
            assert (j - i - BURST) * read_s(gateways) <= answered_s[j] - first_s + 1e-6


@given(st.lists(st.floats(0.0, 0.5), max_size=60), GATEWAYS)
def test_what_comes_no_more_often_than_reads_are_paid_for_is_read_at_once(gaps_s: list[float], gateways: int) -> None:
    assert max(read([gap_s + read_s(gateways) for gap_s in gaps_s], gateways)[0], default=0.0) <= 1e-9


def test_after_a_flood_it_is_soon_as_before() -> None:
    every_s = read_s(4)
    late_s, _ = read([*[every_s / 20] * 1000, 2 * BURST * every_s, *[every_s] * 50], 4)
    assert max(late_s[:1000]) > 0.5 * every_s
    assert max(late_s[1000:]) <= 1e-9


@given(GATEWAYS)
def test_all_gateways_together_read_no_more_than_redis_bears(gateways: int) -> None:
    assert gateways / read_s(gateways) <= 1600.0 + 1e-6
