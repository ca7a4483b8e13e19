"""A burst passes the gate in order: few requests are between gateway and engine, and none stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import orjson
import pytest

from router.choosing.chooser import Choice
from router.edge import fifo as gates
from router.edge.fifo import PLACES, Gate
from router.reading.inbound import Inbound
from router.startup.parts import CHOOSER, DOOR
from tests.router.rig.helpers import Gateway, ScriptedEngine, event, eventually, running, streams
from tests.router.rig.raw_client import GET_HEALTH, RawClient, connected, head

GOOD = streams([event("fine"), b"data: [DONE]\n\n"])


def ask(number: int) -> bytes:
    body = orjson.dumps({"model": "m", "prompt": str(number), "stream": True})
    return head(b"Content-Type: application/json", b"Content-Length: %d" % len(body)) + body


class Guest:
    """Notes when the gate lets it in; leaves at once if told to."""

    def __init__(self, gate: Gate, let_in: list[Guest], *, stays: bool = True) -> None:
        self.gate = gate
        self.let_in = let_in
        self.stays = stays

    def come_in(self) -> None:
        self.let_in.append(self)
        if not self.stays:
            self.gate.leave(self)


async def test_places_go_to_requests_in_the_order_of_arrival() -> None:
    gate, let_in = Gate(places=2), list[Guest]()
    guests = [Guest(gate, let_in) for _ in range(6)]
    assert [gate.enter(guest, 10) for guest in guests] == [True, True, False, False, False, False]
    gate.leave(guests[1])
    gate.leave(guests[3])  # the guest's client has gone
    gate.leave(guests[0])
    assert let_in == [guests[2], guests[4]]
    gate.leave(guests[2])
    gate.leave(guests[2])  # leaving twice counts once
    assert let_in == [guests[2], guests[4], guests[5]]
    assert gate.waiting == 0


async def test_any_number_may_leave_as_soon_as_they_are_in() -> None:
    gate, let_in = Gate(places=1), list[Guest]()
    holder, guests = Guest(gate, let_in), [Guest(gate, let_in, stays=False) for _ in range(5000)]
    assert gate.enter(holder, 1)
    assert not any(gate.enter(guest, 1) for guest in guests)
    gate.leave(holder)
    assert let_in == guests


async def test_what_waits_is_bounded_in_bytes() -> None:
    gate, let_in = Gate(places=1, max_waiting_bytes=100), list[Guest]()
    guests = [Guest(gate, let_in) for _ in range(5)]
    assert [gate.enter(guest, 60) for guest in guests[:3]] == [True, False, True]
    assert not gate.enter(guests[3], 40)
    for guest in guests[:3]:
        gate.leave(guest)
    assert let_in == [guests[3]]
    assert gate.enter(guests[4], 60) is False


async def test_a_place_that_nobody_gives_back_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 0.01)
    gate, let_in = Gate(places=1), list[Guest]()
    guests = [Guest(gate, let_in) for _ in range(3)]
    assert [gate.enter(guest, 1) for guest in guests] == [True, False, False]
    await eventually(lambda: let_in == guests[1:])


class Watch:
    """How many requests are decided, and how many of them the engine has."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine) -> None:
        self.most_between = 0
        chooser = gateway.app[CHOOSER]
        choose: Callable[..., Choice] = chooser.choose
        decided: list[int] = []

        def counted(inbound: Inbound, excluded: frozenset[str] = frozenset()) -> Choice:
            decided.append(1)
            self.most_between = max(self.most_between, len(decided) - len(engine.received))
            return choose(inbound, excluded)

        chooser.choose = counted  # type: ignore[method-assign, assignment]


async def connect(stack: AsyncExitStack, gateway: Gateway, count: int) -> list[RawClient]:
    clients = [await stack.enter_async_context(connected(gateway)) for _ in range(count)]
    await eventually(lambda: len(gateway.app[DOOR].connections) >= count)
    return clients


async def test_a_burst_goes_through_one_after_the_other() -> None:
    engine, count = ScriptedEngine("a", GOOD), 200
    async with running(engine) as gateway, AsyncExitStack() as stack:
        clients = await connect(stack, gateway, count)
        for _ in range(2):  # the second time, connections to the engine are open already
            engine.received.clear()
            watch = Watch(gateway, engine)
            for number, client in enumerate(clients):
                client.send(ask(number))
            for client in clients:
                await client.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
            assert len(engine.received) == count
            # This may exceed the gate's places: the gateway has written requests that the engine has not yet read.
            assert watch.most_between <= count // 4
        assert gateway.app[DOOR].gate.waiting == 0


async def test_a_client_that_is_slow_with_a_head_or_a_body_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 60.0)
    async with running(ScriptedEngine("a", GOOD)) as gateway, AsyncExitStack() as stack:
        slow = await connect(stack, gateway, 4 * PLACES)
        whole = ask(1)
        for number, client in enumerate(slow):
            client.send(whole[: -5 if number % 2 else 20])
        assert (await gateway.post({"model": "m", "prompt": "x"})).status == 200
        for number, client in enumerate(slow):
            client.send(whole[-5 if number % 2 else 20 :])
        for client in slow:
            assert b"fine" in await client.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")


async def test_a_request_that_waits_for_an_engine_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 60.0)
    silent = asyncio.Event()

    async def waits(request):  # type: ignore[no-untyped-def]
        await silent.wait()
        return await GOOD(request)

    async with running(ScriptedEngine("a", waits)) as gateway, AsyncExitStack() as stack:
        clients = await connect(stack, gateway, 4 * PLACES)
        for number, client in enumerate(clients):
            client.send(ask(number))
        await eventually(lambda: gateway.app[DOOR].gate.waiting == 0)
        assert (await gateway.get("/health")).status == 200
        silent.set()
        for client in clients:
            await client.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"nothing that is HTTP\r\n\r\n",
        GET_HEALTH * 3,
        head(b"Content-Length: 2") + b"{}",
        head(b"Content-Length: 5", path=b"/nowhere") + b"12345" + GET_HEALTH,
        ask(1)[:-3],
        ask(1),
    ],
)
async def test_nothing_keeps_its_place_when_it_is_over(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 60.0)
    async with running(ScriptedEngine("a", GOOD)) as gateway:
        for _ in range(2 * PLACES):
            async with connected(gateway) as client:
                client.send(sent)
                await eventually(lambda: bool(gateway.app[DOOR].connections))
                await asyncio.sleep(0)
        assert (await gateway.get("/health")).status == 200
        await eventually(lambda: not gateway.app[DOOR].gate._inside)


async def test_a_client_that_leaves_while_waiting_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 60.0)
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        gate, holders = gateway.app[DOOR].gate, [Guest(Gate(), []) for _ in range(PLACES)]
        for holder in holders:
            assert gate.enter(holder, 1)
        async with connected(gateway) as client:
            client.send(ask(1))
            await eventually(lambda: gate.waiting == 1)
        await eventually(lambda: gate.waiting == 0)
        for holder in holders:
            gate.leave(holder)
        assert (await gateway.post({"model": "m", "prompt": "x"})).status == 200
        assert len(engine.received) == 1
