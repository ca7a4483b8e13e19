"""A second pod is asked while the first is silent: one pod serves the client, and the other request is cancelled.

The engines wait for actions of the gateway, never for a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import orjson
import pytest
from aiohttp import web
from pydantic import ValidationError

from engine.contract.keys import key_seed, prefix_keys
from engine.contract.requests import Endpoint
from router.fleet.pod import Pod
from router.forwarding.exchange import Attempt
from router.forwarding.hedge import Hedges, Race, Steps
from router.reading.inbound import Inbound
from router.settings.gateway import GatewaySettings
from router.startup.parts import CHOOSER, FLEET, INDEX
from tests.router.rig.helpers import (
    DEADLINE_S,
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    drops,
    event,
    eventually,
    running,
    stalls_after,
    streams,
)
from tests.router.rig.storyteller import Storyteller, asked, read, story

PROMPT = "x" * 600
STREAM = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "stream": True}
HEDGE_AFTER_S = 0.02
SILENT = stalls_after(begin=False)


def told(name: str) -> list[bytes]:
    return [event(name), event(" goes on"), b"data: [DONE]\n\n"]


@pytest.fixture(autouse=True)
def budget_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.overload.hedges.HEDGED_ONE_IN", 1)


class Scene:
    """Pods that play the scripts in the order in which the pods are asked."""

    def __init__(self, *scripts: Script, pods: int = 2, **settings: Any) -> None:
        self.scripts = scripts
        self.asked: list[ScriptedEngine] = []
        self.engines = [ScriptedEngine(name, SILENT) for name in "abcd"[:pods]]
        for engine in self.engines:
            engine.script = self._of(engine)
        self.settings = {"hedge_after_s": HEDGE_AFTER_S, "eject_after": 10, **settings}

    def _of(self, engine: ScriptedEngine) -> Script:
        async def play(request: web.Request) -> web.StreamResponse:
            self.asked.append(engine)
            return await self.scripts[len(self.asked) - 1](request)

        return play

    async def are_asked(self, count: int) -> None:
        await eventually(lambda: len(self.asked) == count)

    def pod(self, gateway: Gateway, place: int) -> Pod:
        """Return the pod that was asked as number `place`, from 0."""
        return next(pod for pod in gateway.app[FLEET].pods("m") if pod.pod_id == self.asked[place].pod)

    async def is_let_go(self, place: int) -> None:
        """Wait until the engine sees its connection closed."""
        await eventually(lambda: self.asked[place].open == 0)


def after(wait: Callable[[], Awaitable[None]], script: Script) -> Script:
    """Return a script that first awaits `wait`."""

    async def play(request: web.Request) -> web.StreamResponse:
        await wait()
        return await script(request)

    return play


async def hedges(gateway: Gateway) -> dict[str, float]:
    """Return hedges by outcome, without zeros."""
    lines = (await gateway.get("/metrics")).body.decode().splitlines()
    counts = {line.split('"')[1]: float(line.split()[-1]) for line in lines if "_hedges_total{" in line}
    assert set(counts) == {"won", "lost", "refused"}
    return {outcome: count for outcome, count in counts.items() if count}


async def is_refused(gateway: Gateway) -> None:
    """Wait until a second pod was due to be asked and was refused."""
    async with asyncio.timeout(DEADLINE_S):
        while await hedges(gateway) != {"refused": 1}:  # noqa: ASYNC110 - metrics can only be polled
            await asyncio.sleep(0.005)


def holders(gateway: Gateway) -> set[str]:
    """Pods that are believed to hold the prompt."""
    now_s = asyncio.get_running_loop().time()
    return set(gateway.app[INDEX].match(prefix_keys(PROMPT.encode(), key_seed("m")), now_s))


@pytest.mark.parametrize("silent", [SILENT, stalls_after()], ids=["no head", "a head alone"])
async def test_the_second_pod_serves_the_client_when_the_first_is_silent(
    silent: Script, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(silent, streams(told("second")))
    async with running(*scene.engines, **scene.settings) as gateway:
        reply = await gateway.post(STREAM)
        await scene.is_let_go(0)
        await eventually(lambda: gateway.in_flight == 0)
        slow = scene.pod(gateway, 0)
        assert (reply.status, reply.pod, reply.body) == (200, scene.asked[1].pod, b"".join(told("second")))
        assert [len(engine.received) for engine in scene.engines] == [1, 1]
        assert holders(gateway) == {scene.asked[1].pod}
        assert await hedges(gateway) == {"won": 1}
        assert (slow.faults.count, slow.faults.is_doubtful) == (0, False)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_first_pod_serves_the_client_when_it_answers_first_after_all() -> None:
    scene = Scene()
    scene.scripts = after(lambda: scene.are_asked(2), streams(told("first"))), SILENT
    async with running(*scene.engines, **scene.settings) as gateway:
        reply = await gateway.post(STREAM)
        await scene.is_let_go(1)
        assert (reply.status, reply.pod, reply.body) == (200, scene.asked[0].pod, b"".join(told("first")))
        assert holders(gateway) == {scene.asked[0].pod}
        await eventually(lambda: gateway.in_flight == 0)
        assert await hedges(gateway) == {"lost": 1}
        assert not scene.pod(gateway, 1).faults.is_doubtful


async def test_if_two_pods_answer_at_once_the_client_gets_one_answer() -> None:
    for _ in range(10):
        scene = Scene()
        both = [after(lambda scene=scene: scene.are_asked(2), streams(told(name))) for name in ("first", "second")]  # type: ignore[misc]
        scene.scripts = tuple(both)
        async with running(*scene.engines, **scene.settings) as gateway:
            reply = await gateway.post(STREAM)
            await scene.is_let_go(0)
            await scene.is_let_go(1)
            await eventually(lambda gateway=gateway: gateway.in_flight == 0)  # type: ignore[misc]
            (outcome,) = await hedges(gateway)
            winner = ("lost", "won").index(outcome)
            assert reply.body == b"".join(told(("first", "second")[winner]))
            assert reply.pod == scene.asked[winner].pod
            assert holders(gateway) == {reply.pod}
            assert (await gateway.post({**STREAM, "model": "none"})).status == 404  # on the same connection


@pytest.mark.parametrize("bad", [drops, answers(500)], ids=["breaks off", "500"])
async def test_the_first_pod_still_wins_when_the_second_fails(bad: Script) -> None:
    scene = Scene()
    async with running(*scene.engines, **scene.settings) as gateway:

        async def second_failed() -> None:
            await scene.are_asked(2)
            await eventually(lambda: scene.pod(gateway, 1).faults.is_doubtful)

        scene.scripts = after(second_failed, streams(told("first"))), bad
        reply = await gateway.post(STREAM)
        assert (reply.status, reply.pod, reply.body) == (200, scene.asked[0].pod, b"".join(told("first")))
        assert len(scene.asked) == 2
        assert holders(gateway) == {scene.asked[0].pod}
        assert await hedges(gateway) == {"lost": 1}
        assert scene.pod(gateway, 1).faults.count == 1, "another pod served it, so the request was not at fault"


async def test_the_second_pod_goes_on_when_the_first_fails() -> None:
    scene = Scene(pods=3)
    async with running(*scene.engines, **scene.settings) as gateway:

        async def first_failed() -> None:
            await scene.are_asked(2)
            await eventually(lambda: scene.pod(gateway, 0).faults.is_doubtful)

        scene.scripts = after(lambda: scene.are_asked(2), drops), after(first_failed, streams(told("second")))
        reply = await gateway.post(STREAM)
        assert (reply.status, reply.pod, reply.body) == (200, scene.asked[1].pod, b"".join(told("second")))
        assert len(scene.asked) == 2, "the second pod counts as the one retry"
        assert await hedges(gateway) == {"won": 1}
        assert scene.pod(gateway, 0).faults.count == 1


FULL = answers(429, b'{"error": {"message": "full"}}')


@pytest.mark.parametrize("last", [0, 1], ids=["the first fails last", "the second fails last"])
@pytest.mark.parametrize("retries", [1, 2])
async def test_when_both_fail_it_goes_on_as_after_any_failure(last: int, retries: int) -> None:
    scene = Scene(pods=3, retries=retries)
    async with running(*scene.engines, **scene.settings) as gateway:

        async def other_failed() -> None:
            await scene.are_asked(2)
            await eventually(lambda: scene.pod(gateway, 1 - last).in_flight == 0)

        orders = after(lambda: scene.are_asked(2), FULL), after(other_failed, FULL)
        scene.scripts = (orders[1 - last], orders[last], streams(told("third")))
        reply = await gateway.post(STREAM)
        pods = [engine.pod for engine in scene.asked]
        assert await hedges(gateway) == {"lost": 1}
        assert len(set(pods)) == len(pods) == 1 + retries
        if retries == 1:
            assert (reply.status, reply.json) == (429, {"error": {"message": "full"}})
            assert reply.pod == pods[last], "the error of the last attempt"
            assert not holders(gateway)
        else:
            assert (reply.status, reply.body) == (200, b"".join(told("third")))
            assert holders(gateway) == {reply.pod}


async def test_two_broken_attempts_end_a_request_as_without_a_hedge() -> None:
    scene = Scene(pods=3)
    both_break = after(lambda: scene.are_asked(2), drops)
    scene.scripts = both_break, both_break, streams(told("third"))
    async with running(*scene.engines, **scene.settings) as gateway:
        reply = await gateway.post(STREAM)
        assert (reply.status, len(scene.asked)) == (502, 2)
        assert [pod.faults.count for pod in gateway.app[FLEET].pods("m")] == [0, 0, 0], "the request is at fault"


@pytest.mark.parametrize("status", [400, 404])
async def test_a_refusal_is_an_answer(status: int) -> None:
    scene = Scene(SILENT, answers(status, b'{"error": {"message": "wrong"}}'))
    async with running(*scene.engines, **scene.settings) as gateway:
        reply = await gateway.post(STREAM)
        await scene.is_let_go(0)
        assert (reply.status, reply.json) == (status, {"error": {"message": "wrong"}})
        assert not holders(gateway)


@pytest.mark.parametrize("begun", [False, True], ids=["before an answer", "in the second's stream"])
async def test_both_are_cancelled_when_the_client_leaves(begun: bool) -> None:
    scene = Scene(SILENT, stalls_after([event("second")]) if begun else SILENT)
    async with running(*scene.engines, **scene.settings) as gateway:
        async with aiohttp.ClientSession() as session:
            sent = asyncio.create_task(session.post(f"{gateway.url}/v1/completions", data=orjson.dumps(STREAM)))
            await scene.are_asked(2)
            if begun:
                response = await sent
                assert await response.content.readany() == event("second")
                response.close()
            else:
                sent.cancel()
        await scene.is_let_go(0)
        await scene.is_let_go(1)
        await eventually(lambda: gateway.in_flight == 0)
        assert await hedges(gateway) == {"won" if begun else "lost": 1}
        assert holders(gateway) == ({scene.asked[1].pod} if begun else set())


async def test_a_hedged_stream_that_breaks_is_made_whole_by_another_pod() -> None:
    requests: list[web.Request] = []

    async def wait(request: web.Request, _: int, words: int) -> None:
        if request not in requests:
            requests.append(request)
        if request is requests[0]:
            await asyncio.Event().wait()
        if request is requests[1] and words == 5:
            assert request.transport is not None
            request.transport.abort()

    engines = [Storyteller(name, "other", wait) for name in "abc"]
    async with running(*engines, hedge_after_s=HEDGE_AFTER_S, eject_after=10) as gateway:
        reply = await gateway.post(asked(7))
        assert read(reply.body, Endpoint.COMPLETIONS)["text"] == "".join(story(7))
        assert [len(engine.asked) for engine in engines] == [1, 1, 1]
        assert await hedges(gateway) == {"won": 1}
        await eventually(lambda: not any(engine.open for engine in engines))


async def test_a_pod_that_failed_lately_is_not_asked() -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    scene = Scene(after(wait, streams(told("first"))))
    async with running(*scene.engines, **scene.settings) as gateway:
        for pod in gateway.app[FLEET].pods("m"):
            pod.faults.doubt()
        sent = asyncio.create_task(gateway.post(STREAM))
        await is_refused(gateway)
        release.set()
        assert (await sent).body == b"".join(told("first"))
        assert len(scene.asked) == 1


async def test_a_whole_answer_is_not_hedged() -> None:
    """A stream that is sent later is hedged. If whole answers were hedged, the first request would have been
    hedged by then."""
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    scene = Scene(after(wait, answers(200)), SILENT, streams(told("third")))
    async with running(*scene.engines, **scene.settings) as gateway:
        sent = asyncio.create_task(gateway.post({**STREAM, "stream": False}))
        await scene.are_asked(1)
        assert (await gateway.post(STREAM)).body == b"".join(told("third"))
        assert await hedges(gateway) == {"won": 1}
        release.set()
        assert (await sent).status == 200
        assert len(scene.asked) == 3


@pytest.mark.parametrize("room", [None, frozenset({"b"})], ids=["requests wait", "no pod has room"])
async def test_nothing_is_asked_of_busy_pods(room: frozenset[str] | None) -> None:
    hedged, asked = await raced(1, room)
    assert (hedged, asked) == ({"refused": 1}, 0)


async def test_ten_of_five_hundred_slow_requests_are_hedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.overload.hedges.HEDGED_ONE_IN", 50)
    hedged, asked = await raced(500, frozenset())
    assert (hedged, asked) == ({"refused": 490, "lost": 10}, 10)


async def raced(count: int, busy: frozenset[str] | None) -> tuple[dict[str, int], int]:
    """Send `count` requests in turn. Each first attempt answers only after the gateway has decided about a second one.
    Return hedges by outcome, and how often a second pod was asked."""
    counts: dict[str, int] = {}
    decided = asyncio.Event()
    asked = 0

    def count_one(outcome: str) -> None:
        counts[outcome] = counts.get(outcome, 0) + 1
        decided.set()

    pods = [SimpleNamespace(pod_id=name) for name in "ab"]
    decision = SimpleNamespace(predicted_ttft_s=None)
    choices = [SimpleNamespace(pod=pod, decision=decision) for pod in pods]
    parts = SimpleNamespace(
        pods=lambda _: pods,
        doubtful=lambda _: frozenset(),
        busy=lambda _: busy,
        choose=lambda *_: choices[1],
        attempts=SimpleNamespace(hedged=count_one),
    )
    hedges = Hedges(0.0, *(cast(Any, parts),) * 4)
    inbound = cast(Inbound, SimpleNamespace(model="m", stream=True))
    for _ in range(count):
        decided.clear()
        attempts = [Attempt(inbound, cast(Any, choices[0]), cast(Any, None), 0.0)]

        def begin(choice: Any, attempts: list[Attempt] = attempts) -> Attempt:
            attempts.append(Attempt(cast(Any, None), choice, cast(Any, None), 0.0))
            return attempts[-1]

        async def run(
            attempt: Attempt, race: Race[web.StreamResponse] | None, attempts: list[Attempt] = attempts
        ) -> web.StreamResponse:
            nonlocal asked
            assert race is not None
            if attempt.pod is pods[1]:  # type: ignore[comparison-overlap]
                asked += 1
                decided.set()
                await asyncio.Event().wait()
            await decided.wait()
            race.won_by(attempt)
            assert attempts[-1] is attempt
            return web.StreamResponse()

        await hedges.run(inbound, attempts, attempts[0], Steps(begin, run))
    return counts, asked


@pytest.mark.parametrize("leaves", [False, True], ids=["it stays", "it leaves"])
async def test_a_client_that_leaves_as_the_second_pod_wins_is_gone(leaves: bool) -> None:
    """Both the client and the race cancel the request's task; only the race's cancellation is undone."""
    ended: list[str] = []
    pods = {name: SimpleNamespace(pod=SimpleNamespace(pod_id=name)) for name in ("first", "second")}
    attempts = [Attempt(cast(Any, None), cast(Any, pods["first"]), cast(Any, None), 0.0)]

    def begin(choice: Any) -> Attempt:
        attempts.append(Attempt(cast(Any, None), choice, cast(Any, None), 0.0))
        return attempts[-1]

    async def run(attempt: Attempt, race: Race[web.StreamResponse] | None) -> web.StreamResponse:
        assert race is not None
        try:
            if attempt.pod.pod_id == "second":
                if leaves:
                    request.cancel()
                race.won_by(attempt)
                if not leaves:
                    return web.Response(text="second")
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            ended.append(attempt.pod.pod_id)

    async def handle() -> int:
        race = Race(attempts, attempts[0], lambda: cast(Any, pods["second"]), Steps(begin, run))
        response = await race.run(0.0)
        assert response is not None
        return request.cancelling()

    request = asyncio.create_task(handle())
    (result,) = await asyncio.gather(request, return_exceptions=True)
    assert sorted(ended) == ["first", "second"]
    assert isinstance(result, asyncio.CancelledError) if leaves else result == 0


async def test_a_request_that_is_predicted_to_take_long_is_given_longer() -> None:
    """The limit is 20 ms, but the first token is due in an hour: nothing is late while the client waits."""
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    scene = Scene(after(wait, streams(told("first"))), SILENT)
    async with running(*scene.engines, **scene.settings) as gateway:
        choose = gateway.app[CHOOSER].choose

        def slow(*args: Any) -> Any:
            choice = choose(*args)
            choice.decision.predicted_ttft_s = 3600.0
            return choice

        gateway.app[CHOOSER].choose = slow  # type: ignore[assignment, method-assign]
        sent = asyncio.create_task(gateway.post(STREAM))
        await scene.are_asked(1)
        await asyncio.sleep(5 * HEDGE_AFTER_S)
        assert len(scene.asked) == 1
        assert not await hedges(gateway)
        release.set()
        assert (await sent).body == b"".join(told("first"))


@pytest.mark.parametrize("wrong", [{"first_byte_timeout_s": 1.0}, {"hedge_after_s": -1.0}])
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="hedge"):
        GatewaySettings(engines=["http://127.0.0.1:1"], **{"hedge_after_s": 2.0, **wrong})
