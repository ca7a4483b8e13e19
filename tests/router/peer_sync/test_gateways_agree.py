"""Whatever happens to Redis or to gateways, all gateways believe the same after a quiet time.

The tests run in virtual time, with a scripted server. The gateways are compared with one index that gets all events.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import looptime
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.contract.events import Keys
from engine.contract.keys import prefix_keys
from router.peer_sync.messages import Assumed, Life, PeerMessage
from router.peer_sync.peers import Peers
from router.registry.index import PrefixIndex
from router.views.types import PodId
from tests.router.peer_sync.ends import STRIDE, TTL_S, Assumptions, End, ScriptedServer, ScriptedWire

PODS = [PodId("a"), PodId("b")]
QUIET_S = 8.0
WRITTEN_S = 45.0
"""After this time all changes are written, so new gateways know again what was in a trimmed stream."""
PHASES = (Phase.explicit, Phase.generate)
"""Without shrinking: an example takes seconds, so trying thousands of shorter ones would take very long."""


def chain(text: str) -> Keys:
    return prefix_keys(text.encode(), 0, 2)


POD = st.sampled_from(PODS)
CHAIN = st.text("ab", min_size=2, max_size=12).map(chain)
WHO = st.integers(0, 2)
DEEDS: Any = st.one_of(
    st.tuples(st.just("route"), WHO, POD, CHAIN),
    st.tuples(st.just("route"), WHO, POD, CHAIN),
    st.tuples(st.just("undo"), WHO, POD, CHAIN),
    st.tuples(st.just("refute"), WHO, POD, CHAIN, st.integers(0, 6)),
    st.tuples(st.just("forget"), WHO, POD),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 6.0])),
)


class Play:
    """Three gateways, any of which may be replaced, and the index that gets all their events."""

    def __init__(self, backlog_bytes: int = 2**20) -> None:
        self.server = ScriptedServer()
        self.model = PrefixIndex()
        self.routed: dict[PodId, set[int]] = {pod: set() for pod in PODS}
        self._backlog_bytes = backlog_bytes
        self._number = 0
        self.ends: list[End] = []

    async def add(self) -> End:
        self._number += 1
        wires = ScriptedWire(self.server), ScriptedWire(self.server)
        end = End(self._number, PODS, wires, backlog_bytes=self._backlog_bytes)
        await end.start()
        return end

    async def begin(self) -> None:
        self.ends = [await self.add() for _ in range(3)]
        await asyncio.sleep(1.0)

    async def end(self) -> None:
        for end in self.ends:
            await end.kill()

    async def act(self, deed: tuple[Any, ...]) -> None:
        now_s = asyncio.get_running_loop().time()
        match deed:
            case "route", who, pod, keys:
                end = self.ends[who]
                end.outbox.ended(end.route(pod, keys), now_s)
                self.model.speculate(pod, keys, now_s, TTL_S)
                self.routed[pod] |= set(keys)
            case "undo", who, pod, keys, *delay_s:
                end = self.ends[who]
                self.server.delay_s = sum(delay_s)
                number = end.route(pod, keys)
                self.model.speculate(pod, keys, now_s, TTL_S)
                await asyncio.sleep(0.3)
                end.undo(pod, keys, number, now_s)
                self.model.retract(pod, keys)
            case "refute", who, pod, keys, held:
                self.ends[who].refute(pod, keys, held)
                self.model.refute(pod, keys, held, now_s)
                self.model.speculate(pod, keys, now_s, TTL_S)
                self.routed[pod] |= set(keys)
            case "forget", who, pod:
                self.ends[who].forget(pod)
                self.model.drop(pod)
            case "wait", seconds:
                await asyncio.sleep(seconds)
            case "lose", count:
                self.server.loses = count
            case ("trim",):
                self.server.trim()
            case ("flush",):
                self.server.flush()
            case "away", seconds:
                self.server.is_away = True
                await asyncio.sleep(seconds)
                self.server.is_away = False
            case "kill" | "stop" as how, who:
                await (self.ends[who].kill() if how == "kill" else self.ends[who].stop())
                self.ends[who] = await self.add()
                assert await self.ends[who].reader.wait_warm(5.0) or self.server.is_away
        await asyncio.sleep(0.3)


def assumed(index: PrefixIndex) -> dict[PodId, set[int]]:
    return {pod: {key for _, keys in index.assumed(pod) for key in keys} for pod in PODS}


def played(play: Play, deeds: list[tuple[Any, ...]], quiet_s: float = QUIET_S) -> list[dict[PodId, set[int]]]:
    """Return what each gateway, and an additional new one, believes in the end."""

    async def run() -> list[dict[PodId, set[int]]]:
        await play.begin()
        try:
            for deed in deeds:
                await play.act(deed)
            await asyncio.sleep(quiet_s)
            play.ends.append(await play.add())
            await asyncio.sleep(quiet_s)
            assert not any(end.sink.in_flight for end in play.ends), "a request has not ended"
            return [assumed(end.sink.index) for end in play.ends]
        finally:
            await play.end()

    loop = looptime.new_event_loop(noop_cycles=1)  # no sockets here: nothing comes from outside between two timers
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


@given(deeds=st.lists(DEEDS, max_size=10))
@settings(max_examples=10, phases=PHASES)
def test_gateways_know_what_a_single_gateway_would_know(deeds: list[tuple[Any, ...]]) -> None:
    play = Play()
    for found in played(play, deeds):
        assert found == assumed(play.model)


def deeds_of(seed: int) -> tuple[list[tuple[Any, ...]], int]:
    """Return deeds and faults that the seed determines, and the size of the gateways' backlogs in bytes."""
    rng = random.Random(seed)
    names = ("route", "route", "undo", "refute", "forget", "wait", "lose", "trim", "flush", "away", "kill", "stop")

    def deed() -> tuple[Any, ...]:
        keys = chain("".join(rng.choice("ab") for _ in range(rng.randint(2, 12))))
        name, who, pod = rng.choice(names), rng.randint(0, 2), rng.choice(PODS)
        match name:
            case "route" | "undo":
                return name, who, pod, keys
            case "refute":
                return name, who, pod, keys, rng.randint(0, 6)
            case "forget":
                return name, who, pod
            case "wait":
                return name, rng.choice([1.0, 6.0])
            case "lose":
                return name, rng.randint(1, 3)
            case "away":
                return name, rng.choice([0.3, 8.0])
            case "kill" | "stop":
                return name, who
        return (name,)

    deeds = [deed() for _ in range(rng.randint(3, 10))]
    return deeds, rng.choice([400, 2**20])


def check_they_agree(deeds: list[tuple[Any, ...]], backlog_bytes: int) -> None:
    play = Play(backlog_bytes)
    first, *others = played(play, deeds, quiet_s=WRITTEN_S)
    for found in others:
        assert found == first
    for pod in PODS:
        assert first[pod] <= play.routed[pod], "no gateway believes what never happened"


@pytest.mark.parametrize("seed", [*range(1000, 1015), 2015])
def test_gateways_agree_again_after_any_fault(seed: int) -> None:
    """One of the faults is a backlog that is too small for the messages while Redis is down. With seed 2015, a gateway
    stops that others have asked for all that it assumes: its messages are in the stream when it has gone."""
    check_they_agree(*deeds_of(seed))


@pytest.mark.parametrize("backlog_bytes", [400, 2**20])
def test_an_emptied_pod_is_told_again_when_the_message_was_lost(backlog_bytes: int) -> None:
    check_they_agree([("refute", 0, "b", chain("ab"), 0), ("lose", 2), ("forget", 0, "b")], backlog_bytes)


@pytest.mark.parametrize("delay_s", [0.02, 0.2, 2.0])
def test_a_request_that_never_ran_counts_for_nothing_even_if_its_message_was_slow(delay_s: float) -> None:
    """The time of a message is when Redis got it, so a slow message seems to be about a later request."""
    for found in played(Play(), [("undo", 0, "a", chain("ab"), delay_s)]):
        assert not any(found.values())


def test_a_gateway_that_has_stopped_is_not_heard_again_in_the_same_messages() -> None:
    peers = Peers(Assumptions(PODS), Life(1))
    assumed = Assumed(Life(2), 2, STRIDE, PODS[0], 1.0, [])
    assert peers.apply(PeerMessage(Life(2), "two", 1, STRIDE), 1.0, 1.0).is_news
    assert peers.hear(assumed, 1.0).is_news
    assert peers.apply(PeerMessage(Life(2), "two", 3, STRIDE, is_last=True), 1.0, 1.0).is_news
    assert not len(peers)
    for is_past in (False, True):
        assert not peers.hear(assumed, 2.0, is_past=is_past).is_news
        assert not peers.hear(assumed, 2.0, is_past=is_past).is_gap
    assert not len(peers)
