"""A stream survives its pod: another one gives the rest, and the client reads one answer."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import orjson
import pytest
from aiohttp import web
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from engine.contract.requests import Endpoint
from router.engines.engine_client import EngineClient, NotConnected
from router.startup.parts import ADMISSION, FLEET
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    event,
    eventually,
    running,
    streams,
)
from tests.router.rig.storyteller import WORDS, Gate, Storyteller, asked, read, story

BOTH = pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
KINDS = {Endpoint.CHAT: ("warmroute", "vllm", "sglang"), Endpoint.COMPLETIONS: ("warmroute", "vllm", "other")}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def then(text: str) -> dict[str, float]:
    """Return how many streams broke, by what their clients got then."""
    lines = [line for line in text.splitlines() if line.startswith("warmroute_gateway_broken_attempts_total{")]
    return {line.split('"')[1]: count for line in lines if (count := float(line.split()[-1]))}


async def counted(gateway: Gateway) -> dict[str, float]:
    return then((await gateway.get("/metrics")).body.decode())


async def told_with_a_death(
    kind: str, endpoint: Endpoint, numbers: range, *, pods: int = 3, **fields: Any
) -> tuple[list[Answer], dict[str, float], list[Storyteller]]:
    """Return the answers to the numbered requests, with one of several pods killed in the middle of all its answers."""
    gate = Gate(lambda number: 1 + number % (WORDS - 1))
    engines = [Storyteller(name, kind, gate.wait) for name in "abcdef"[:pods]]
    async with running(*engines) as gateway:
        calls = [asyncio.create_task(gateway.post(asked(n, endpoint, **fields), path=endpoint)) for n in numbers]
        await eventually(lambda: gate.waiting == len(numbers))
        await engines[0].stop()
        gate.open()
        answers = await asyncio.gather(*calls)
        return answers, await counted(gateway), engines


@pytest.mark.parametrize(("endpoint", "kind"), [(e, kind) for e, kinds in KINDS.items() for kind in kinds])
async def test_a_pod_that_dies_under_a_hundred_streams_changes_no_text(endpoint: Endpoint, kind: str) -> None:
    numbers = range(100) if kind == "warmroute" else range(40)
    answers, what, engines = await told_with_a_death(kind, endpoint, numbers, **USAGE)
    for number, answer in zip(numbers, answers, strict=True):
        assert answer.is_whole
        seen = read(answer.body, endpoint)
        assert seen["text"] == "".join(story(number))
        assert (seen["answers"], seen["finish"]) == (1, ["stop"])
        assert seen["roles"] == (["assistant"] if endpoint is Endpoint.CHAT else [])
        (usage,) = seen["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, WORDS, 10 + WORDS)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= 10
    broken = len(engines[0].asked)
    assert broken >= len(numbers) // 3
    assert what == {"resumed": broken}


@BOTH
@pytest.mark.parametrize("most", [7, WORDS - 1, WORDS])
async def test_no_more_tokens_come_than_were_asked_for(endpoint: Endpoint, most: int) -> None:
    kind = KINDS[endpoint][1]
    answers, _, _ = await told_with_a_death(kind, endpoint, range(most - 1), max_tokens=most, **USAGE)
    for number, answer in enumerate(answers):
        seen = read(answer.body, endpoint)
        assert seen["text"] == "".join(story(number)[:most])
        assert seen["finish"] == ["stop" if most == WORDS else "length"]
        assert seen["usage"][0]["completion_tokens"] == most


async def test_usage_in_every_event_goes_on_counting() -> None:
    every: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answers, _, _ = await told_with_a_death("vllm", Endpoint.CHAT, range(23), **every)
    for answer in answers:
        counts = read(answer.body, Endpoint.CHAT)["running"]
        assert counts == sorted(counts)
        assert counts[-1] == WORDS


async def test_the_official_client_reads_one_answer() -> None:
    gate = Gate(lambda number: 5)
    engines = [Storyteller(name, "vllm", gate.wait) for name in "ab"]

    def ask(url: str) -> list[ChatCompletionChunk]:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return list(client.chat.completions.create(**asked(3, Endpoint.CHAT, **USAGE)))

    async with running(*engines) as gateway:
        call = asyncio.create_task(asyncio.to_thread(ask, gateway.url))
        await eventually(lambda: gate.waiting == 1)
        await next(engine for engine in engines if engine.asked).stop()
        gate.open()
        chunks = await call
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "".join(story(3))
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == WORDS


# -- where it breaks, and how ------------------------------------------------------------------------------------------


async def breaks(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(60)


async def falls_silent(request: web.Request) -> None:
    await asyncio.sleep(60)


@BOTH
@pytest.mark.parametrize("how", [breaks, falls_silent])
@pytest.mark.parametrize("words", [0, 1, 12, WORDS, WORDS + 2])
async def test_it_may_break_anywhere(endpoint: Endpoint, how: Any, words: int) -> None:
    """Before the first word nothing is sent, so another pod is simply asked. After the last word only the end is
    missing."""
    first = True

    async def wait(request: web.Request, number: int, at: int) -> None:
        nonlocal first
        if at == words and first:
            first = False
            await how(request)

    engines = [Storyteller(name, KINDS[endpoint][1], wait) for name in "ab"]
    async with running(*engines, idle_timeout_s=0.2, first_byte_timeout_s=0.2, eject_after=10) as gateway:
        answer = await gateway.post(asked(5, endpoint), path=endpoint)
        what = await counted(gateway)
    seen = read(answer.body, endpoint)
    assert seen["text"] == "".join(story(5))
    assert (seen["answers"], seen["finish"]) == (1, ["stop"])
    assert what == ({"ended" if words > WORDS else "resumed": 1.0} if words else {})


def error_event(code: int) -> bytes:
    return (
        b"data: " + orjson.dumps({"error": {"message": "CUDA error", "type": "server_error", "code": code}}) + b"\n\n"
    )


def fails_after(chunks: list[bytes]) -> Script:
    return streams([*chunks, b"data: [DONE]\n\n"], gap_s=0.01)


def words(*of: str) -> list[bytes]:
    return [event(word) for word in of]


@pytest.mark.parametrize("joined", [False, True])
async def test_an_engine_that_tells_of_its_failure_is_made_good(joined: bool) -> None:
    first, *chunks = [*words(*story(1)[:3]), error_event(500)]
    bad = ScriptedEngine("a", fails_after([first, b"".join(chunks)] if joined else [first, *chunks]))
    good = Storyteller("b")
    async with running(bad, good, eject_after=10) as gateway:
        answers = [await gateway.post(asked(1)) for _ in range(2)]
        pods = {pod.pod_id: pod.faults.count for pod in gateway.app[FLEET].pods("m")}
    assert bad.received
    for answer in answers:
        assert b"CUDA" not in answer.body
        text = "".join(orjson.loads(part[6:])["choices"][0]["text"] for part in answer.body.split(b"\n\n")[:-2])
        assert text == "".join(story(1))
    assert pods == {"a": 1, "b": 0}


async def test_an_error_of_the_client_is_passed_on_as_it_is() -> None:
    chunks = [*words(" w1"), error_event(400), b": and more\n\n", b"data: [DONE]\n\n"]
    async with running(ScriptedEngine("a", streams(chunks, gap_s=0.01)), eject_after=10) as gateway:
        answer = await gateway.post(asked(1))
    assert answer.body == b"".join(chunks)
    assert answer.is_whole


async def test_an_error_that_nobody_makes_good_is_the_last_event_in_the_engines_words() -> None:
    """The engine ends its stream with [DONE] all the same; a client that waits for [DONE] would think it whole."""
    chunks = [*words(" w1"), error_event(500), b": and more\n\n", b"data: [DONE]\n\n"]
    async with running(ScriptedEngine("a", streams(chunks, gap_s=0.01)), eject_after=10) as gateway:
        answer = await gateway.post(asked(1))
        what = await counted(gateway)
    assert answer.body == b"".join(chunks[:2])
    assert not answer.is_whole
    assert what == {"engine": 1.0}


@pytest.mark.parametrize("retries", [2, 3])
async def test_breaks_in_a_row_are_bounded_by_the_retries(retries: int) -> None:
    left = {4, 9, 14}

    async def wait(request: web.Request, number: int, at: int) -> None:
        if at in left:
            left.remove(at)
            await breaks(request)

    engines = [Storyteller(name, "vllm", wait) for name in "abcd"]
    async with running(*engines, retries=retries, eject_after=10) as gateway:
        answer = await gateway.post(asked(2))
        what = await counted(gateway)
    assert answer.is_whole == (retries == 3)
    assert what == ({"resumed": 3} if retries == 3 else {"resumed": 2, "failed": 1})
    assert sum(len(engine.asked) for engine in engines) == 1 + retries


async def test_a_request_that_breaks_every_pod_at_one_place_meets_two_of_them() -> None:
    async def wait(request: web.Request, number: int, at: int) -> None:
        if at == 4:
            await breaks(request)

    engines = [Storyteller(name, "vllm", wait) for name in "abcd"]
    async with running(*engines, retries=3, eject_after=10) as gateway:
        answer = await gateway.post(asked(2))
    assert not answer.is_whole
    assert b'"upstream_error"' in answer.body
    assert sum(len(engine.asked) for engine in engines) == 2


async def test_a_client_that_leaves_while_the_rest_is_awaited_leaves_nothing_behind() -> None:
    async def wait(request: web.Request, number: int, at: int) -> None:
        await (breaks(request) if at == 3 else asyncio.sleep(0))

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    first, second = Storyteller("a", "vllm", wait), ScriptedEngine("b", hang)
    async with running(first, second, policy="round_robin") as gateway:
        while not second.open:
            call = asyncio.create_task(gateway.post(asked(1)))
            await eventually(lambda: second.open == 1)
        call.cancel()
        await eventually(lambda: second.open == 0)


async def test_a_gateway_that_lacks_descriptors_for_the_rest_ends_the_answer_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none_left(*args: object) -> None:
        raise NotConnected(errno.EMFILE, "Too many open files")

    gate = Gate(lambda number: 4)
    engines = [Storyteller(name, "vllm", gate.wait) for name in "ab"]
    async with running(*engines) as gateway:
        call = asyncio.create_task(gateway.post(asked(1)))
        await eventually(lambda: gate.waiting == 1)
        monkeypatch.setattr(EngineClient, "post", none_left)
        await next(engine for engine in engines if engine.asked).stop()
        gate.open()
        answer = await asyncio.wait_for(call, 10)  # a second head within the answer would leave the client waiting
        assert await counted(gateway) == {"failed": 1}
    assert b'"upstream_error"' in answer.body
    assert not answer.is_whole


async def test_an_answer_that_an_engine_counts_as_complete_ends() -> None:
    """The gateway counts events; the engine that continues the answer knows the tokens."""
    gate = Gate(lambda number: 4)
    body = b'{"error": {"message": "nothing is left", "type": "invalid_request_error", "code": "answer_complete"}}'
    first, second = Storyteller("a", "other", gate.wait), ScriptedEngine("b", answers(400, body))
    async with running(first, second) as gateway:
        calls = [asyncio.create_task(gateway.post(asked(1))) for _ in range(2)]  # one goes to each pod
        await eventually(lambda: gate.waiting == 1)
        await first.stop()
        gate.open()
        replies = await asyncio.gather(*calls)
        assert await counted(gateway) == {"ended": 1}
    (told,) = (reply for reply in replies if reply.status == 200)
    seen = read(told.body, Endpoint.COMPLETIONS)
    assert (seen["text"], seen["finish"]) == ("".join(story(1)[:4]), ["length"])


# -- where it is not done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "request"),
        ({"logprobs": 1}, "request"),
        ({"echo": True}, "request"),
        ({"response_format": {"type": "json_object"}}, "engine"),
        ({"guided_json": {}}, "engine"),
        ({"stop": ["w12 and"]}, "request"),
        ({"stop": ["never" * 200_000]}, "request"),
        ({"metadata": orjson.Fragment(b"[" * 500 + b"]" * 500)}, "size"),
        ({"presence_penalty": 0.5}, "engine"),
        ({"resume": False}, "off"),
        ({"max_tokens": 1000, "n": 1, "best_of": 1, "logprobs": None, "stop": ["never"], "frequency_penalty": 0}, ""),
    ],
)
async def test_what_cannot_be_had_from_elsewhere_ends_in_an_error_event(fields: dict[str, Any], why: str) -> None:
    gate = Gate(lambda number: 2)
    engines = [Storyteller(name, "other", gate.wait) for name in "ab"]
    resumes = fields.pop("resume", True)
    async with running(*engines, resume_streams=resumes) as gateway:
        call = asyncio.create_task(gateway.post(asked(1, **fields)))
        await eventually(lambda: gate.waiting == 1)
        await next(engine for engine in engines if engine.asked).stop()
        gate.open()
        answer = await call
        what = await counted(gateway)
    assert answer.is_whole == (not why)
    assert what == {why or "resumed": 1}
    assert (b'"upstream_error"' in answer.body) == bool(why)


async def test_chats_go_on_only_at_engines_that_say_they_continue_messages() -> None:
    gate = Gate(lambda number: 2)
    engines = [Storyteller(name, "other", gate.wait) for name in "ab"]
    async with running(*engines) as gateway:
        call = asyncio.create_task(gateway.post(asked(1, Endpoint.CHAT), path=Endpoint.CHAT))
        await eventually(lambda: gate.waiting == 1)
        await next(engine for engine in engines if engine.asked).stop()
        assert not (await call).is_whole
        assert await counted(gateway) == {"engine": 1}


async def test_streams_beyond_the_budget_of_answers_are_passed_on_and_not_kept() -> None:
    gate = Gate(lambda number: 2)
    engines = [Storyteller(name, "vllm", gate.wait) for name in "ab"]
    async with running(*engines) as gateway:
        gateway.app[ADMISSION]._max_answer_bytes = 0
        call = asyncio.create_task(gateway.post(asked(1)))
        await eventually(lambda: gate.waiting == 1)
        await next(engine for engine in engines if engine.asked).stop()
        assert not (await call).is_whole
        assert await counted(gateway) == {"size": 1}
