"""Pods whose probes succeed and whose answers fail attract no traffic, and bad requests do not eject a pod."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.engines.stream_events import Says, error_in, events_in, says
from router.fleet import faults
from router.fleet.pod import Pod
from router.startup.parts import FLEET
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    cuts_body,
    dies_after,
    drops,
    event,
    eventually,
    running,
    stalls_after,
    streams,
)

NUMBERS = itertools.count()
GOOD = streams([event("a"), event("b"), b"data: [DONE]\n\n"], gap_s=0.002)
ERROR = b'data: {"error": {"message": "CUDA error", "type": "%b", "code": %b}}\n\n'
FULL = streams([ERROR % (b"SERVICE_UNAVAILABLE", b"503"), b"data: [DONE]\n\n"])
BROKEN = ERROR % (b"InternalServerError", b"500")
LATE = streams([event("a"), BROKEN, b"data: [DONE]\n\n"], gap_s=0.02)


def ask(text: str | None = None, *, stream: bool = True) -> dict[str, Any]:
    """Return a request with the prompt `text`, or with a prompt unlike all others."""
    return {"model": "m", "stream": stream, "prompt": text or f"question {next(NUMBERS)} " * 40}


def after(seconds: float, script: Script) -> Script:
    async def play(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await script(request)

    return play


def chosen(choose: Callable[[str], Script]) -> Script:
    """Return a script whose answer depends on the prompt."""

    async def play(request: web.Request) -> web.StreamResponse:
        return await choose(orjson.loads(await request.read())["prompt"])(request)

    return play


def taking(gateway: Gateway) -> set[str]:
    """Pods that take requests."""
    return {str(pod.pod_id) for pod in gateway.app[FLEET].pods("m")}


def ejected(gateway: Gateway) -> list[Pod]:
    """Return the ejected pods, on trial or not."""
    return [pod for pod in gateway.app[FLEET].answering() if pod.faults.is_ejected]


async def on_trial(gateway: Gateway) -> None:
    """Wait until the one ejected pod may be tried, which is at its first probe after the ejection's end."""
    (pod,) = ejected(gateway)
    (member,) = (member for member in gateway.app[FLEET].members() if member.pod is pod)
    clock = asyncio.get_running_loop().time
    await eventually(lambda: clock() > pod.faults._until_s)
    member.ask()
    await eventually(lambda: pod.faults.standing is faults.Standing.ON_TRIAL)


async def ask_until(gateway: Gateway, condition: Callable[[], bool], most: int = 300) -> list[Answer]:
    """Send requests, two at a time, until the condition holds."""
    replies: list[Answer] = []
    while not condition():
        assert len(replies) < most, "it never came true"
        replies += await asyncio.gather(gateway.post(ask()), gateway.post(ask()))
    return replies


@pytest.mark.parametrize("policy", ["predicted_ttft", "least_loaded", "round_robin"])
@pytest.mark.parametrize(
    "bad",
    [
        answers(500),
        answers(502),
        answers(503),
        answers(504),
        drops,
        streams([]),
        streams([BROKEN, b"data: [DONE]\n\n"]),
        after(0.05, answers(500)),
    ],
    ids=["500", "502", "503", "504", "drop", "empty stream", "error at once", "slow 500"],
)
async def test_a_pod_that_answers_only_errors_is_ejected_and_no_client_sees_one(bad: Script, policy: str) -> None:
    pods = [ScriptedEngine("bad", bad), *(ScriptedEngine(name, GOOD) for name in "xyz")]
    async with running(*pods, policy=policy, probe_interval_s=60) as gateway:
        replies = await ask_until(gateway, lambda: taking(gateway) == {"x", "y", "z"})
        received = len(pods[0].received)
        replies += await asyncio.gather(*(gateway.post(ask()) for _ in range(20)))
        text = (await gateway.get("/metrics")).body.decode()
        ready = (await gateway.get("/ready")).json["pods"]
        shown = {pod["pod"]: pod["ejected"] for pod in (await gateway.get("/v1/pods")).json["pods"]}
    assert {reply.status for reply in replies} == {200}
    assert b"error" not in b"".join(reply.body for reply in replies)
    assert len(pods[0].received) == received <= 8
    assert 'warmroute_gateway_engine_ejected{engine="bad"} 1.0' in text
    assert "warmroute_gateway_ejections_total 1.0" in text
    assert ready == {"known": 4, "admitted": 3, "ejected": 1}
    assert shown == {"bad": True, "x": False, "y": False, "z": False}


@pytest.mark.parametrize("policy", ["predicted_ttft", "least_loaded"])
async def test_several_broken_pods_fail_a_request_each_at_most(policy: str) -> None:
    bad = [ScriptedEngine(f"bad{i}", answers(500)) for i in range(3)]
    pods = [*bad, *(ScriptedEngine(name, GOOD) for name in "vwxyz")]
    async with running(*pods, policy=policy, probe_interval_s=60) as gateway:
        replies = await ask_until(gateway, lambda: taking(gateway) == set("vwxyz"))
        replies += [await gateway.post(ask()) for _ in range(20)]
    assert sum(reply.status != 200 for reply in replies) <= 3


async def test_without_retries_clients_see_as_many_errors_as_it_takes() -> None:
    pods = [ScriptedEngine("bad", answers(500)), *(ScriptedEngine(name, GOOD) for name in "xyz")]
    async with running(*pods, policy="least_loaded", retries=0, probe_interval_s=60) as gateway:
        replies = [await gateway.post(ask()) for _ in range(60)]
    assert [reply.status for reply in replies].count(500) == len(pods[0].received) == 3


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (answers(429), 429),
        (answers(503, extra={"Retry-After": "1"}), 503),
        (answers(501), 501),
        (answers(400), 400),
        (answers(404), 404),
        (streams([ERROR % (b"BadRequestError", b"400")]), 200),
        (stalls_after(begin=False), 504),
    ],
    ids=["429", "503 with Retry-After", "501", "400", "404", "bad request within the stream", "silence"],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_overload_and_the_clients_own_errors_eject_nobody(script: Script, status: int, stream: bool) -> None:
    pods = [ScriptedEngine("a", script), ScriptedEngine("b", GOOD)]
    # The limit is short only if it is meant to run out: on a busy machine other answers are slow, too.
    limits: dict[str, Any] = {"first_byte_timeout_s": 0.05, "total_timeout_s": 0.2} if status == 504 else {}
    async with running(*pods, retries=0, **limits) as gateway:
        replies = [await gateway.post(ask(stream=stream)) for _ in range(12)]
        assert gateway.app[FLEET].ejections == 0
        assert not any(pod.faults.is_doubtful for pod in gateway.app[FLEET].pods("m"))
    assert [reply.status for reply in replies].count(status) >= 6


@pytest.mark.parametrize("refusal", [answers(503), FULL], ids=["503", "503 within the stream"])
async def test_a_pod_that_answers_some_requests_and_refuses_the_others_is_full_and_stays(
    monkeypatch: pytest.MonkeyPatch, refusal: Script
) -> None:
    """Not every engine sends Retry-After. A full pod is not suspect, and its requests may use all retries."""
    monkeypatch.setattr(faults, "AT_WORK_S", 60.0)
    pods = [ScriptedEngine(name, GOOD) for name in "abc"]
    async with running(*pods, probe_interval_s=60) as gateway:
        for _ in range(3):
            assert (await gateway.post(ask())).status == 200
        pods[0].script = pods[1].script = refusal
        replies = [await gateway.post(ask()) for _ in range(15)]
        assert (gateway.app[FLEET].ejections, gateway.app[FLEET].doubtful("m")) == (0, frozenset())
    assert {reply.body for reply in replies} == {event("a") + event("b") + b"data: [DONE]\n\n"}


async def test_a_pod_that_only_refuses_is_ejected_though_it_was_at_work_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "AT_WORK_S", 0.05)
    pods = [ScriptedEngine(name, GOOD) for name in "abc"]
    async with running(*pods, probe_interval_s=60) as gateway:
        for _ in range(3):
            assert (await gateway.post(ask())).status == 200
        pods[0].script = FULL
        replies = await ask_until(gateway, lambda: taking(gateway) == {"b", "c"})
    assert {reply.status for reply in replies} == {200}


async def test_something_that_cuts_every_long_stream_ejects_no_pod() -> None:
    pods = [ScriptedEngine(name, dies_after([event("a")])) for name in "abcd"]
    async with running(*pods) as gateway:
        for _ in range(30):
            assert not (await gateway.post(ask())).is_whole
        assert gateway.app[FLEET].ejections == 0
        assert taking(gateway) == set("abcd")


async def test_bad_requests_eject_nobody_however_many_they_are_and_meet_two_pods_each() -> None:
    pods = [
        ScriptedEngine(name, chosen(lambda prompt: answers(500) if "poison" in prompt else GOOD)) for name in "abcd"
    ]
    async with running(*pods, policy="predicted_ttft") as gateway:
        once = await gateway.post(ask("poison"))
        assert sum(len(pod.received) for pod in pods) == 2
        for _ in range(10):
            await asyncio.gather(*(gateway.post(ask(f"poison {next(NUMBERS)}")) for _ in range(5)))
            await gateway.post(ask("poison"))
        assert gateway.app[FLEET].ejections == 0
        assert sum(len(pod.received) for pod in pods) == 2 * 61
        assert (await gateway.post(ask())).status == 200
    assert once.status == 500


async def test_what_one_pod_fails_and_another_refuses_is_no_pods_fault() -> None:
    pods = [ScriptedEngine("a", answers(500)), ScriptedEngine("b", answers(400)), ScriptedEngine("c", answers(400))]
    async with running(*pods) as gateway:
        assert {(await gateway.post(ask())).status for _ in range(30)} == {400}
        assert gateway.app[FLEET].ejections == 0
    assert pods[0].received


async def test_a_pod_that_breaks_off_is_not_down() -> None:
    """The pod answers its probe, so its known cache and load stay, although it reports no restarts."""
    pods = [ScriptedEngine(None, drops), ScriptedEngine("b", GOOD)]
    async with running(*pods, policy="least_loaded", eject_after=1, probe_interval_s=60) as gateway:
        known = set(gateway.app[FLEET].answering())
        replies = await ask_until(gateway, lambda: gateway.app[FLEET].ejections == 1)
        assert set(gateway.app[FLEET].answering()) == known
        received = len(pods[0].received)
        replies += [await gateway.post(ask()) for _ in range(10)]
        assert len(pods[0].received) == received
    assert {reply.status for reply in replies} == {200}


@pytest.mark.parametrize(
    "bad", [drops, LATE, dies_after([event("a")]), answers(500)], ids=["drop", "error", "break", "500"]
)
async def test_one_bad_request_repeated_ejects_nobody_even_without_a_second_opinion(bad: Script) -> None:
    pods = [ScriptedEngine(name, chosen(lambda prompt: bad if "poison" in prompt else GOOD)) for name in "abcd"]
    async with running(*pods, policy="predicted_ttft", retries=0, eject_after=3) as gateway:
        for _ in range(12):
            await gateway.post(ask("poison"))
        assert gateway.app[FLEET].ejections == 0


async def test_bad_requests_without_a_second_opinion_leave_half_of_the_pods_and_good_ones_go_on() -> None:
    pods = [
        ScriptedEngine(name, chosen(lambda prompt: answers(500) if "poison" in prompt else GOOD)) for name in "abcdef"
    ]
    async with running(*pods, retries=0) as gateway:
        for _ in range(60):
            await gateway.post(ask(f"poison {next(NUMBERS)}"))
        assert len(taking(gateway)) == 3
        assert [(await gateway.post(ask())).status for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("bad", [dies_after([event("a")]), LATE], ids=["break", "error event"])
async def test_a_pod_whose_streams_all_fail_after_their_first_byte_is_ejected(bad: Script) -> None:
    pods = [ScriptedEngine("bad", bad), *(ScriptedEngine(name, GOOD) for name in "xyz")]
    async with running(*pods, policy="least_loaded", probe_interval_s=60) as gateway:
        await ask_until(gateway, lambda: taking(gateway) == {"x", "y", "z"})
        received = len(pods[0].received)
        replies = [await gateway.post(ask()) for _ in range(20)]
    assert {reply.body for reply in replies} == {event("a") + event("b") + b"data: [DONE]\n\n"}
    assert len(pods[0].received) == received


@pytest.mark.parametrize("bad", [cuts_body, answers(500), drops], ids=["half a body", "500", "drop"])
async def test_whole_answers_tell_as_much(bad: Script) -> None:
    pods = [ScriptedEngine("bad", bad), *(ScriptedEngine(name, answers(200)) for name in "xyz")]
    async with running(*pods, probe_interval_s=60) as gateway:
        for _ in range(40):
            assert (await gateway.post(ask(stream=False))).status == 200
        assert taking(gateway) == {"x", "y", "z"}


async def test_a_pod_that_fails_every_other_request_stays_and_clients_see_nothing_of_it() -> None:
    turns = itertools.cycle([answers(500), GOOD])

    async def play(request: web.Request) -> web.StreamResponse:
        return await next(turns)(request)

    pods = [ScriptedEngine("flaky", play), ScriptedEngine("b", GOOD), ScriptedEngine("c", GOOD)]
    async with running(*pods) as gateway:
        replies = [await gateway.post(ask()) for _ in range(60)]
        assert taking(gateway) == {"flaky", "b", "c"}
    assert {reply.status for reply in replies} == {200}
    assert len(pods[0].received) > 10


@pytest.mark.parametrize("count", [1, 4])
async def test_when_all_pods_fail_clients_get_their_errors_and_recovery_needs_no_wait(count: int) -> None:
    pods = [ScriptedEngine(f"p{i}", answers(500, b'{"error": {"message": "CUDA error"}}')) for i in range(count)]
    async with running(*pods, policy="least_loaded") as gateway:
        for _ in range(30):
            answer = await gateway.post(ask())
            assert (answer.status, answer.json["error"]["message"]) == (500, "CUDA error")
        for pod in pods:
            pod.script = GOOD
        assert (await gateway.post(ask())).status == 200


async def test_a_pod_that_works_again_is_tried_and_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FIRST_EJECTION_S", 0.05)
    pods = [ScriptedEngine("bad", answers(500)), ScriptedEngine("b", GOOD), ScriptedEngine("c", GOOD)]
    async with running(*pods, policy="least_loaded", probe_interval_s=60) as gateway:
        await ask_until(gateway, lambda: gateway.app[FLEET].ejections == 1)
        await on_trial(gateway)
        received = len(pods[0].received)
        replies = await ask_until(gateway, lambda: gateway.app[FLEET].ejections == 2)
        assert len(pods[0].received) == received + 1
        pods[0].script = GOOD
        await on_trial(gateway)
        replies += await ask_until(gateway, lambda: taking(gateway) == {"bad", "b", "c"} and not ejected(gateway))
    assert {reply.status for reply in replies} == {200}


async def test_a_trial_takes_one_of_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FIRST_EJECTION_S", 0.05)
    pods = [ScriptedEngine("bad", answers(500)), ScriptedEngine("b", GOOD), ScriptedEngine("c", GOOD)]
    async with running(*pods, policy="least_loaded", probe_interval_s=60) as gateway:
        await ask_until(gateway, lambda: gateway.app[FLEET].ejections == 1)
        pods[0].script = stalls_after(begin=False)
        received = len(pods[0].received)
        await on_trial(gateway)
        calls = [asyncio.create_task(gateway.post(ask())) for _ in range(40)]
        await eventually(lambda: sum(call.done() for call in calls) == 39)
        assert len(pods[0].received) == received + 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_client_that_leaves_blames_nobody() -> None:
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    async with running(engine, ScriptedEngine("b", GOOD)) as gateway:
        for _ in range(8):
            call = asyncio.create_task(gateway.post(ask()))
            await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: engine.open == 0)
        assert [pod.faults.count for pod in gateway.app[FLEET].pods("m")] == [0, 0]


async def test_the_engines_own_word_in_a_stream_is_told_from_generated_text() -> None:
    text = event('data: {"error": {"message": "no"}}') + event('\n\ndata: {"error": 1}\n\n')
    pods = [ScriptedEngine(name, streams([text, b"data: [DONE]\n\n"])) for name in "ab"]
    async with running(*pods) as gateway:
        replies = [await gateway.post(ask()) for _ in range(12)]
        assert [pod.faults.count for pod in gateway.app[FLEET].pods("m")] == [0, 0]
    assert {reply.body for reply in replies} == {text + b"data: [DONE]\n\n"}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (BROKEN, "CUDA error"),
        (BROKEN.replace(b"data: ", b"data:").replace(b"\n", b"\r\n"), "CUDA error"),
        (event("a") + BROKEN + b"data: [DONE]\n\n", "CUDA error"),
        (b'data: {"error":{"message":"step","type":"server_error","param":null,"code":null}}\n\n', "step"),
        (b'data: {"error":{"type":"OOM"}}\n\n', "OOM"),
        (b'data: {"error": "lost"}\n\n', "lost"),
        (b'event: error\ndata: {"mess\n\n', '{"mess'),
        (b"event: error\ndata:\n\n", "an error"),
        (b'data: {"choices": [], "error": {"message": "late"}}\n\n', "late"),
        (b'data: {"error":\ndata: {"message": "lines"}}\n\n', "lines"),
        (b'data: {"error": null, "choices": []}\n\n', None),
        (b'data: {"error": {"message": "no", "code": 400}}\n\n', None),
        (b'data: {"error": {"message": "no", "type": "invalid_request_error"}}\n\n', None),
        (event("a"), None),
        (event('"error"') + event('\ndata: {"error": 1}'), None),
        (b"", None),
    ],
)
def test_whose_fault_an_error_event_is(events: bytes, message: str | None) -> None:
    errors = [error_in(event).message for event in events_in(events) if says(event) is Says.ERROR]
    assert errors == ([] if message is None else [message])


@given(st.binary())
def test_no_bytes_are_too_odd_for_it(data: bytes) -> None:
    for said in events_in(data + b'\n\ndata: {"error":' + data + b"\n\n"):
        if says(said) is Says.ERROR:
            assert error_in(said).message


async def test_an_error_at_the_start_of_a_stream_reaches_the_client_if_no_pod_does_better() -> None:
    async with running(ScriptedEngine("a", streams([BROKEN, b"data: [DONE]\n\n"]))) as gateway:
        answer = await gateway.post(ask())
    assert (answer.status, answer.json["error"]["message"]) == (502, "CUDA error")
