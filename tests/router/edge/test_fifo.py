"""A burst passes the fifo in order: few requests are between gateway and engine, and none stops the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import orjson
import pytest

from router.choosing.chooser import Choice
from router.edge import fifo as gates
from router.edge.fifo import PLACES, Fifo
from router.overload.standing import Standing
from router.reading.inbound import Inbound
from router.startup.parts import CHOOSER, CONNECTIONS
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, event, eventually, running, streams
from tests.router.rig.raw_client import GET_HEALTH, RawClient, connected, head

GOOD = streams([event("fine"), b"data: [DONE]\n\n"])


WHOLE = answers(200, b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}')


def ask(number: int, *, stream: bool = True) -> bytes:
    body = orjson.dumps({"model": "m", "prompt": str(number), "stream": stream})
    return head(b"Content-Type: application/json", b"Content-Length: %d" % len(body)) + body


class Waiter:
    """Notes when the fifo lets it in; leaves at once if told to."""

    def __init__(self, fifo: Fifo, let_in: list[Waiter], *, stays: bool = True) -> None:
        self.fifo = fifo
        self.let_in = let_in
        self.stays = stays

    def turn_away(self) -> bool:
        return False

    def take_turn(self) -> None:
        self.let_in.append(self)
        if not self.stays:
            self.fifo.leave(self)


async def test_places_go_to_requests_in_the_order_of_arrival() -> None:
    fifo, let_in = Fifo(places=2), list[Waiter]()
    waiters = [Waiter(fifo, let_in) for _ in range(6)]
    assert [fifo.enter(waiter, 10) for waiter in waiters] == [True, True, False, False, False, False]
    fifo.leave(waiters[1])
    fifo.leave(waiters[3])  # the waiter's client has gone
    fifo.leave(waiters[0])
    assert let_in == [waiters[2], waiters[4]]
    fifo.leave(waiters[2])
    fifo.leave(waiters[2])  # leaving twice counts once
    assert let_in == [waiters[2], waiters[4], waiters[5]]
    assert fifo.waiting == 0


async def test_any_number_may_leave_as_soon_as_they_are_in() -> None:
    fifo, let_in = Fifo(places=1), list[Waiter]()
    holder, waiters = Waiter(fifo, let_in), [Waiter(fifo, let_in, stays=False) for _ in range(5000)]
    assert fifo.enter(holder, 1)
    assert not any(fifo.enter(waiter, 1) for waiter in waiters)
    fifo.leave(holder)
    assert let_in == waiters


async def test_what_waits_is_bounded_in_bytes() -> None:
    fifo, let_in = Fifo(places=1, max_waiting_bytes=100), list[Waiter]()
    waiters = [Waiter(fifo, let_in) for _ in range(5)]
    assert [fifo.enter(waiter, 60) for waiter in waiters[:3]] == [True, False, True]
    assert not fifo.enter(waiters[3], 40)
    for waiter in waiters[:3]:
        fifo.leave(waiter)
    assert let_in == [waiters[3]]
    assert fifo.enter(waiters[4], 60) is False


async def test_a_place_that_nobody_gives_back_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 0.01)
    fifo, let_in = Fifo(places=1), list[Waiter]()
    waiters = [Waiter(fifo, let_in) for _ in range(3)]
    assert [fifo.enter(waiter, 1) for waiter in waiters] == [True, False, False]
    await eventually(lambda: let_in == waiters[1:])


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
    await eventually(lambda: len(gateway.app[CONNECTIONS].open) >= count)
    return clients


async def test_a_burst_goes_through_one_after_the_other() -> None:
    engine, count = ScriptedEngine("a", GOOD), 200
    async with running(engine) as gateway, AsyncExitStack() as stack:
        clients = await connect(stack, gateway, count)
        for _ in range(2):  # the second time, waiters to the engine are open already
            engine.received.clear()
            watch = Watch(gateway, engine)
            for number, client in enumerate(clients):
                client.send(ask(number))
            for client in clients:
                await client.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
            assert len(engine.received) == count
            # This may exceed the fifo's places: the gateway has written requests that the engine has not yet read.
            assert watch.most_between <= count // 4
        assert gateway.app[CONNECTIONS].fifo.waiting == 0


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
        await eventually(lambda: gateway.app[CONNECTIONS].fifo.waiting == 0)
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
                await eventually(lambda: bool(gateway.app[CONNECTIONS].open))
                await asyncio.sleep(0)
        assert (await gateway.get("/health")).status == 200
        await eventually(lambda: not gateway.app[CONNECTIONS].fifo._inside)


async def test_a_client_that_leaves_while_waiting_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 60.0)
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        fifo, holders = gateway.app[CONNECTIONS].fifo, [Waiter(Fifo(), []) for _ in range(PLACES)]
        for holder in holders:
            assert fifo.enter(holder, 1)
        async with connected(gateway) as client:
            client.send(ask(1))
            await eventually(lambda: fifo.waiting == 1)
        await eventually(lambda: fifo.waiting == 0)
        for holder in holders:
            fifo.leave(holder)
        assert (await gateway.post({"model": "m", "prompt": "x"})).status == 200
        assert len(engine.received) == 1


class Line:
    """A fifo with one place, in a time of its own: requests come at `rate` times what it can do, each takes 10 ms."""

    SERVICE_S = 0.01

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.fifo = Fifo(places=1)
        self.served: list[tuple[float, float]] = []
        """When a request came, and how long it waited."""
        self.away: list[float] = []
        """When a request came that was turned away."""
        self._busy: tuple[float, InLine] | None = None

    def begin(self, waiter: InLine) -> None:
        self.served.append((waiter.came_s, self.now_s - waiter.came_s))
        self._busy = (self.now_s + self.SERVICE_S, waiter)

    def come(self, rate: float, seconds: float) -> None:
        """Let requests come, and leave when they are served."""
        until_s, next_s = self.now_s + seconds, self.now_s
        while next_s < until_s:
            if self._busy is not None and self._busy[0] <= next_s:
                self.now_s, done = self._busy
                self._busy = None
                self.fifo.leave(done)
            else:
                self.now_s = next_s
                next_s += self.SERVICE_S / rate
                waiter = InLine(self)
                if self.fifo.enter(waiter, 1):
                    self.begin(waiter)


class InLine:
    """A request in the line."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.came_s = line.now_s

    def turn_away(self) -> bool:
        self.line.away.append(self.came_s)
        return True

    def take_turn(self) -> None:
        self.line.begin(self)


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99])
async def test_nobody_is_turned_away_while_the_gateway_keeps_up(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 1e9)
    line = Line(monkeypatch)
    line.come(rate, 20.0)
    line.come(2.0, 1.5)  # a burst
    line.come(0.5, 10.0)
    assert not line.away
    assert len(line.served) == pytest.approx(100 * (20 * rate + 3 + 5), abs=5)


@pytest.mark.parametrize("rate", [1.5, 2.0, 4.0, 20.0])
async def test_if_more_comes_than_it_can_do_those_that_are_served_are_in_time(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "MAX_HOLD_S", 1e9)
    line = Line(monkeypatch)
    line.come(rate, 30.0)
    later = [waited_s for came_s, waited_s in line.served if came_s > 10]
    assert max(later) <= gates.LONGEST_WAIT_S
    assert len(line.served) == pytest.approx(3000, abs=150)  # and the gateway is busy all the time
    assert line.away
    gone = len(line.away)
    line.come(0.5, 30.0)
    line.come(0.5, 30.0)
    assert len(line.away) < gone + 2 * gates.LONGEST_WAIT_S * rate / line.SERVICE_S, "the crowd is over"


async def test_what_is_turned_away_is_answered_and_its_connection_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of the request has come; and probes are served."""
    engine = ScriptedEngine("a", WHOLE)
    async with running(engine) as gateway, AsyncExitStack() as open_:
        fifo = gateway.app[CONNECTIONS].fifo
        monkeypatch.setattr(gates, "MAX_HOLD_S", 1e9)
        monkeypatch.setattr(gates, "LONGEST_WAIT_S", 0.0)
        monkeypatch.setattr(Standing, "lasts", lambda *_: True)
        stuck = [Waiter(fifo, []) for _ in range(PLACES)]

        async def crowded(sent: bytes) -> RawClient:
            assert all(fifo.enter(one, 1) for one in stuck)
            client = await open_.enter_async_context(connected(gateway))
            client.send(sent)
            await eventually(lambda: fifo.waiting == 1)
            for one in stuck:
                fifo.leave(one)
            return client

        whole = ask(1, stream=False)
        for cut in (len(whole), len(whole) - 1, len(whole) - 20):
            client = await crowded(whole[:cut])
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert b"\r\nretry-after: 1\r\n" in answer.head.lower()
            client.send(whole[cut:] + ask(2, stream=False))
            assert (await client.answer()).status == 200
        chunked = head(b"Content-Type: application/json", b"Transfer-Encoding: chunked")
        for unsure in (chunked, head(b"Expect: 100-continue", b"Content-Length: 5"), whole + ask(3, stream=False)):
            client = await crowded(unsure)
            assert (await client.answer()).status == 503
            assert await client.closed() == b""
        client = await crowded(GET_HEALTH)
        assert (await client.answer()).status == 200
        assert len(engine.received) == 3
        assert gateway.app[CONNECTIONS].refused["busy"] == 6
        assert b'warmroute_gateway_connections_refused_total{reason="busy"} 6.0' in (await gateway.get("/metrics")).body
