"""What a real vLLM does when it drains, sleeps, is full, or loses its core. No client notices."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from engine.common.sse import SseDecoder
from engine.contract.keys import key_seed, prefix_keys
from router.fleet import faults
from router.reading.model_ratios import PRIOR_OUTPUT_TOKENS
from router.startup.parts import CHOOSER, FLEET, INDEX
from tests.router.rig.helpers import Answer, Gateway, eventually, running
from tests.router.rig.vllm_pod import DEAD, VllmPod

STREAM = {"model": "m", "prompt": "x" * 600, "stream": True, "max_tokens": 50}
WHOLE = {**STREAM, "stream": False}
TEXT = "".join(f" w{i}" for i in range(5))


def text_of(answer: Answer) -> str:
    """The text of a stream that ends as it should."""
    assert answer.status == 200, answer.body
    events = list(SseDecoder().feed(answer.body))
    assert events[-1] == b"[DONE]", answer.body
    assert answer.is_whole
    choices = [choice for event in events[:-1] for choice in orjson.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return "".join(choice["text"] for choice in choices)


async def metric(gateway: Gateway, name: str) -> float:
    """Return the sum of the metric's series."""
    lines = (await gateway.get("/metrics")).body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


async def check_no_noise(gateway: Gateway) -> None:
    assert gateway.app[FLEET].ejections == 0
    assert await metric(gateway, "warmroute_gateway_engine_ejected") == 0


def up(gateway: Gateway) -> list[str]:
    return [pod.url for pod in gateway.app[FLEET].pods("m")]


# -- draining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dev", [False, True])
@pytest.mark.parametrize("fields", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_a_pod_that_drains_is_left_at_the_first_sign(fields: dict[str, Any], dev: bool) -> None:
    """The pod gets a burst larger than the retry budget. Its health and its list of models answer 200 all the time."""
    drains, stays = VllmPod("drains", gap_s=0.05, dev=dev), VllmPod("stays", dev=dev)
    async with running(drains, stays, retries=1) as gateway:
        begun = [asyncio.create_task(gateway.post(fields)) for _ in range(4)]
        await eventually(lambda: drains.open == 2)
        drains.draining = True
        burst = await asyncio.gather(*(gateway.post(fields) for _ in range(60)))
        ended = await asyncio.gather(*begun)
        await asyncio.sleep(0.5)  # five probes
        assert up(gateway) == [stays.url], "probes do not bring the pod back"
        told = len(drains.received)
        late = [await gateway.post(fields) for _ in range(4)]
        assert len(drains.received) == told
        (shown,) = (p for p in (await gateway.get("/v1/pods")).json["pods"] if p["url"] == drains.url)
        await check_no_noise(gateway)
        drains.draining, port = False, int(drains.url.rsplit(":", 1)[1])
        await drains.stop()
        await eventually(lambda: not shown_of(gateway, drains.url).admitted)
        await drains.start(port)
        await gateway.wait_pods(2)
    for answer in (*begun_answers(burst), *ended, *late):
        assert (text_of(answer) if fields is STREAM else answer.json["choices"][0]["text"]) == TEXT
    assert (shown["ejected"], shown["failed_in_a_row"]) == (False, 0)
    assert shown["leaving"] or dev  # with `dev` the probe may hear of the drain before any request does


async def begun_at(gateway: Gateway, pod: VllmPod, fields: dict[str, Any]) -> asyncio.Task[Answer]:
    """Send requests until one goes to this pod, and return it once the pod has begun to answer."""
    while True:
        told, call = pod.told, asyncio.create_task(gateway.post(fields))
        await eventually(lambda told=told, call=call: pod.told > told or call.done())  # type: ignore[misc]
        if pod.told > told:
            return call


def begun_answers(burst: list[Answer]) -> list[Answer]:
    assert {answer.status for answer in burst} == {200}
    return burst


def shown_of(gateway: Gateway, url: str) -> Any:
    return next(member for member in gateway.app[FLEET].members() if member.url == url)


async def test_if_the_last_pod_drains_a_client_is_told_to_try_again() -> None:
    drains = VllmPod("drains", dev=False)
    async with running(drains) as gateway:
        drains.draining = True
        answers = [await gateway.post(STREAM) for _ in range(2)]
        await check_no_noise(gateway)
    for answer in answers:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "scheduled" not in answer.body.decode()
    assert len(drains.received) == 1


async def test_if_the_last_pod_drains_a_request_waits_for_the_next_pod() -> None:
    drains, comes = VllmPod("drains", dev=False), VllmPod("comes", dev=False)
    await comes.start()
    port = int(comes.url.rsplit(":", 1)[1])
    await comes.stop()
    async with running(drains, comes, wait=1, activation_timeout_s=20) as gateway:
        drains.draining = True
        call = asyncio.create_task(gateway.post(STREAM))
        await eventually(lambda: len(drains.received) == 1)
        await comes.start(port)
        assert text_of(await call) == TEXT


async def test_a_wrong_word_costs_one_trial_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FIRST_LEAVE_S", 0.3)
    says, other = VllmPod("says", dev=False), VllmPod("other", dev=False)
    async with running(says, other) as gateway:
        says.draining = True
        await asyncio.gather(*(gateway.post(STREAM) for _ in range(2)))
        assert up(gateway) == [other.url]
        says.draining = False
        await gateway.wait_pods(2)
        assert {text_of(await gateway.post(STREAM)) for _ in range(4)} == {TEXT}
        await eventually(lambda: not shown_of(gateway, says.url).pod.faults.is_leaving)
        await check_no_noise(gateway)


# -- a dead core, an answer given up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dead", "aborting"])
async def test_a_stream_of_a_pod_that_fails_in_its_own_words_goes_on_elsewhere(how: str) -> None:
    fails, good = VllmPod("fails", 2_000, gap_s=0.05), VllmPod("good", 3)
    async with running(fails, good) as gateway:
        call = await begun_at(gateway, fails, STREAM)
        setattr(fails, how, True)
        answer = await call
        assert (await gateway.post(STREAM)).status == 200
        assert await metric(gateway, 'warmroute_gateway_broken_attempts_total{then="resumed"}') == 1
        if how == "dead":
            await eventually(lambda: up(gateway) == [good.url])
        await check_no_noise(gateway)
    assert text_of(answer).endswith(" w0 w1 w2")
    assert b"EngineCore" not in answer.body
    asked = next(body for body in (orjson.loads(r.body) for r in good.received) if " w0" in body["prompt"])
    assert asked["prompt"].startswith("x" * 600 + " w0"), "the stream goes on from there"


@pytest.mark.parametrize("how", ["dead", "aborting"])
@pytest.mark.parametrize("resume", [True, False])
async def test_if_no_pod_can_go_on_the_stream_ends_with_an_error_and_no_done(how: str, resume: bool) -> None:
    fails = VllmPod("fails", 2_000, gap_s=0.05)
    async with running(fails, resume_streams=resume) as gateway:
        call = await begun_at(gateway, fails, STREAM)
        setattr(fails, how, True)
        answer = await call
        assert await metric(gateway, "warmroute_gateway_broken_streams_total") == 1
        assert output_tokens(gateway) == PRIOR_OUTPUT_TOKENS
    events = list(SseDecoder().feed(answer.body))
    said = orjson.loads(events[-1])["error"]
    assert b"[DONE]" not in events
    assert not answer.is_whole
    assert said["message"] == (DEAD if how == "dead" else "the engine gave the answer up")
    assert b'"abort"' not in answer.body


@pytest.mark.parametrize("how", ["dead", "aborting"])
async def test_a_whole_answer_that_fails_is_asked_for_elsewhere(how: str) -> None:
    fails, good = VllmPod("fails", 2_000, gap_s=0.05), VllmPod("good")
    async with running(fails, good) as gateway:
        call = await begun_at(gateway, fails, WHOLE)
        setattr(fails, how, True)
        answer = await call
        await check_no_noise(gateway)
    assert (answer.status, answer.json["choices"][0]["finish_reason"]) == (200, "length")
    assert good.received


async def test_an_aborted_whole_answer_that_nobody_makes_good_is_an_error() -> None:
    fails = VllmPod("fails")
    fails.aborting = True
    async with running(fails) as gateway:
        answer = await gateway.post(WHOLE)
    assert (answer.status, answer.json["error"]["message"]) == (502, "the engine gave the answer up")


async def test_an_answer_that_was_given_up_comes_from_a_full_pod_if_there_is_no_other() -> None:
    gives_up, full = VllmPod("gives up"), VllmPod("full", 40, gap_s=0.05)
    full.most = 1
    async with running(gives_up, full) as gateway:
        running_one = await begun_at(gateway, full, STREAM)
        assert {(await gateway.post(STREAM)).status for _ in range(4)} == {200}
        assert shown_of(gateway, full.url).pod.in_flight == 1, "its refusals show that the pod is full"
        full.most, gives_up.aborting = None, True
        answers = await asyncio.gather(*(gateway.post(STREAM) for _ in range(2)))
        assert {text_of(answer)[:3] for answer in (*answers, await running_one)} == {" w0"}
    assert len(gives_up.received) > 4


async def test_a_request_that_kills_engines_meets_two_of_them() -> None:
    pods = [VllmPod(name, dev=False) for name in "abcd"]
    for pod in pods:
        pod.dead = True
    async with running(*pods, retries=3) as gateway:
        assert (await gateway.post(STREAM)).status == 500
    assert sum(len(pod.received) for pod in pods) == 2


# -- asleep -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_a_pod_that_sleeps_is_found_by_the_next_probe(fields: dict[str, Any]) -> None:
    """The pod still lists its models, but its requests hang. They are sent elsewhere, and the pod gets no more."""
    sleeps, wakes = VllmPod("sleeps"), VllmPod("wakes")
    async with running(sleeps, wakes, policy="cache_aware", probe_interval_s=0.3) as gateway:
        while not sleeps.received:
            await gateway.post({**fields, "prompt": str(len(wakes.received)) * 600})
        sleeps.asleep, sleeps.says_so = True, False
        calls = [asyncio.create_task(gateway.post({**fields, "prompt": str(i) * 600})) for i in range(20)]
        await eventually(lambda: sleeps.hung > 0)
        sleeps.says_so = True
        answers = await asyncio.wait_for(asyncio.gather(*calls), 30)
        assert {answer.status for answer in answers} == {200}
        await eventually(lambda: up(gateway) == [wakes.url])
        (shown,) = (p for p in (await gateway.get("/v1/pods")).json["pods"] if p["url"] == sleeps.url)
        assert "it sleeps" in shown["last_error"]
        before = len(sleeps.received)
        assert {(await gateway.post(fields)).status for _ in range(3)} == {200}
        assert len(sleeps.received) == before
        await check_no_noise(gateway)
        sleeps.asleep = False
        await gateway.wait_pods(2)
        keys = prefix_keys(b"0" * 600, key_seed("m"))
        name = sleeps.url.removeprefix("http://")
        now_s = asyncio.get_running_loop().time
        # Sleep has emptied the cache. Listeners of the fleet hear of the restart one turn of the loop later.
        await eventually(lambda: name not in gateway.app[INDEX].match(keys, now_s()))


async def test_a_request_that_only_a_sleeping_pod_can_answer_waits_for_it() -> None:
    sleeps = VllmPod("sleeps")
    async with running(sleeps) as gateway:
        sleeps.asleep = True
        call = asyncio.create_task(gateway.post(STREAM))
        await eventually(lambda: sleeps.hung == 1 and not up(gateway))
        refused = await gateway.post(STREAM)
        sleeps.asleep = False
        assert text_of(await call) == TEXT
    assert (refused.status, "Retry-After" in refused.headers) == (503, True)


async def test_a_pod_that_computes_for_long_is_not_taken_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a step of 100,000 tokens the pod sends no token and its core does not answer. Nothing is given up."""
    busy, other = VllmPod("busy"), VllmPod("other")
    busy.prefill_s, busy.core_is_busy = 3.0, True
    async with running(busy, other, probe_interval_s=0.05, probe_timeout_s=0.2, wait=2) as gateway:
        call = asyncio.create_task(gateway.post(STREAM))
        other_call = await gateway.post(STREAM)
        await eventually(lambda: busy.naps_asked > 4)
        assert len(up(gateway)) == 2
        assert text_of(await call) == text_of(other_call) == TEXT
        assert len(busy.received) == len(other.received) == 1, "each request was answered by the pod that began it"
        busy.core_is_busy = False
        await check_no_noise(gateway)
    assert busy.naps_asked < 40


async def test_an_engine_that_cannot_sleep_is_asked_once() -> None:
    pod = VllmPod("pod", dev=False)
    async with running(pod, probe_interval_s=0.02) as gateway:
        await asyncio.sleep(0.4)
        assert text_of(await gateway.post(STREAM)) == TEXT
    assert pod.naps_asked == 1


# -- full, and usage in every event -----------------------------------------------------------------------------------


async def test_a_full_pod_is_full_whatever_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod answers 503 without Retry-After, and no stream has begun lately that would show that it works."""
    monkeypatch.setattr(faults, "AT_WORK_S", 0.0)
    full, other = VllmPod("full", 40, gap_s=0.05), VllmPod("other")
    full.most = 1
    async with running(full, other, eject_after=1) as gateway:
        running_one = await begun_at(gateway, full, STREAM)
        answers = [await gateway.post(STREAM) for _ in range(12)]
        pods = {pod.url: pod for pod in gateway.app[FLEET].pods("m")}
        assert set(pods) == {full.url, other.url}
        assert (pods[full.url].faults.count, pods[full.url].faults.is_doubtful) == (0, False)
        await check_no_noise(gateway)
        assert (await running_one).status == 200
    assert {text_of(answer) for answer in answers} == {TEXT}
    assert len(full.received) > 1


@pytest.mark.parametrize("forced", [True, False])
async def test_usage_in_every_event_is_counted_once_and_right(forced: bool) -> None:
    pod = VllmPod("pod", forced_usage=forced)
    async with running(pod, policy="cache_aware") as gateway:
        assert text_of(await gateway.post({**STREAM, "stream_options": {"include_usage": True}})) == TEXT
        for kind, tokens in (("prompt", 150.0), ("cached", 96.0)):
            assert (
                await metric(gateway, f'warmroute_gateway_tokens_total{{kind="{kind}",policy="cache_aware"}}') == tokens
            )
        assert output_tokens(gateway) < PRIOR_OUTPUT_TOKENS


@pytest.mark.parametrize("resume", [True, False])
async def test_a_stream_that_breaks_after_early_usage_teaches_nothing_of_answers_or_caches(resume: bool) -> None:
    pod = VllmPod("pod", 2_000, gap_s=0.05, forced_usage=True)
    async with running(pod, policy="cache_aware", resume_streams=resume) as gateway:
        call = await begun_at(gateway, pod, STREAM)
        pod.aborting = True  # the last event counts all tokens made so far
        answer = await call
        assert b'"completion_tokens"' in answer.body
        assert output_tokens(gateway) == PRIOR_OUTPUT_TOKENS
        assert await metric(gateway, 'warmroute_gateway_tokens_total{kind="prompt",policy="cache_aware"}') == 0
        assert not shown_of(gateway, pod.url).pod.tells_cached_tokens


def output_tokens(gateway: Gateway) -> float:
    return gateway.app[CHOOSER]._estimates.of("m").output_tokens
