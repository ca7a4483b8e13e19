"""If vLLM gives up an answer before its first token and ends it as if it were whole, another pod answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sse import DONE, SseDecoder, named_event, sse_event
from engine.contract.requests import Endpoint
from engine.server.answers import Usage
from engine.server.message_answers import MessagesAnswer
from router.engines.engine_errors import is_cut
from router.engines.stream_events import Says, events_in, says
from router.engines.stream_reader import HELD_BYTES, StreamFailed, StreamReader
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    running,
    stalls_after,
    streams,
)
from tests.router.rig.storyteller import WORDS, Storyteller, read, story
from tests.router.rig.storyteller import asked as asked_story
from tests.router.rig.tellers import STORY, Teller
from tests.router.rig.tellers import asked as asked_named
from tests.router.rig.vllm_cut_words import STREAMS, WHOLES

TEXT = "".join(STORY)


class GivesUp(ScriptedEngine):
    """A vLLM that goes to sleep during every request."""

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [card]})


def good(endpoint: Endpoint) -> ScriptedEngine:
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return Storyteller("good", "vllm")
    return Teller("good", "vllm", [], None)


def asked(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return asked_story(3, endpoint, **fields)
    return asked_named(endpoint, stream=True, **fields)


def check_whole(answer: Answer, endpoint: Endpoint) -> None:
    """Check that the answer has the good pod's text once, and nothing of the other pod's end."""
    assert (answer.status, answer.is_whole) == (200, True), answer.body
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        seen = read(answer.body, endpoint)
        assert (seen["text"], seen["finish"], seen["answers"]) == ("".join(story(3)), ["stop"], 1)
        assert [usage["completion_tokens"] for usage in seen["usage"]] == [WORDS] * len(seen["usage"])
        assert len(seen["usage"]) <= 1
        return
    events = [orjson.loads(data) for data in SseDecoder().feed(answer.body)]
    kinds = [event["type"] for event in events]
    assert len({kinds.count(kind) for kind in (kinds[0], kinds[-1])} - {1}) == 0, kinds
    deltas = [event["delta"] for event in events if event["type"].endswith("_text.delta")]
    deltas += [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == TEXT


async def meet(gateway: Gateway, engine: ScriptedEngine, endpoint: Endpoint, **fields: Any) -> Answer:
    """Return the answer to a request that goes to this pod first."""
    for _ in range(4):
        answer = await gateway.post(asked(endpoint, **fields), path=endpoint)
        if engine.received:
            return answer
    raise AssertionError("no request went there")


def apart(events: Iterable[bytes]) -> Script:
    """Return a script that sends each event in a packet of its own."""
    return streams(events, gap_s=0.05)


@pytest.mark.parametrize("is_apart", [False, True], ids=["at once", "apart"])
@pytest.mark.parametrize(("endpoint", "events"), STREAMS.values(), ids=STREAMS)
async def test_a_stream_that_ends_before_its_first_token_comes_from_elsewhere(
    endpoint: Endpoint, events: list[bytes], is_apart: bool
) -> None:
    fails = GivesUp(None, apart(events) if is_apart else streams([b"".join(events)]))
    async with running(fails, good(endpoint)) as gateway:
        options = {"stream_options": {"include_usage": True}} if len(events) > 1 else {}
        answer = await meet(gateway, fails, endpoint, **options)
        assert (await gateway.get("/v1/pods")).json["pods"][0]["failed_in_a_row"] == 0
    check_whole(answer, endpoint)


@pytest.mark.parametrize("name", ["completion", "completion with an account"])
async def test_if_no_event_came_no_record_is_needed(name: str) -> None:
    endpoint, events = STREAMS[name]
    fails = GivesUp(None, streams([b"".join(events)]))
    async with running(fails, good(endpoint), resume_streams=False) as gateway:
        check_whole(await meet(gateway, fails, endpoint), endpoint)


async def test_a_stream_without_a_reason_in_the_middle_goes_on_elsewhere() -> None:
    """The engine's events have the field `finish_reason`, so an end without a reason shows that the stream was cut."""
    told = "".join(story(3)[:2])
    choice = {"index": 0, "text": told, "finish_reason": None}
    head = {"id": "cut", "created": 1, "model": "m"}
    begun = sse_event(
        orjson.dumps({**head, "choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 2}})
    )
    fails, endpoint = GivesUp(None, apart([begun, DONE])), Endpoint.COMPLETIONS
    async with running(fails, good(endpoint)) as gateway:
        check_whole(await meet(gateway, fails, endpoint), endpoint)


async def test_an_engine_that_never_tells_reasons_is_believed() -> None:
    events = [sse_event(orjson.dumps({"choices": [{"index": 0, "text": "all"}]})), DONE]
    for script in (streams([b"".join(events)]), apart(events)):
        pods = [ScriptedEngine(name, script) for name in "ab"]
        async with running(*pods) as gateway:
            answer = await gateway.post(asked(Endpoint.COMPLETIONS))
        assert (answer.status, answer.body) == (200, b"".join(events))
        assert sum(len(pod.received) for pod in pods) == 1


def test_an_account_of_tokens_alone_is_an_answer() -> None:
    """An engine may send no event for tokens that have no text."""
    account = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}\n\n'
    with pytest.raises(StreamFailed):
        StreamReader(Endpoint.COMPLETIONS).read(account % 0 + DONE)
    reader = StreamReader(Endpoint.COMPLETIONS)
    reader.read(account % 3 + DONE)
    assert reader.has_end


async def test_a_response_that_is_only_announced_has_not_begun() -> None:
    """A vLLM announces the response and goes to sleep: the request hangs, and the client has no token yet."""
    endpoint, events = STREAMS["response"]
    hangs = GivesUp(None, stalls_after(events[:2]))
    async with running(hangs, good(endpoint), first_byte_timeout_s=0.5) as gateway:
        check_whole(await meet(gateway, hangs, endpoint), endpoint)


async def test_a_long_announcement_is_passed_on_before_its_response() -> None:
    """An announcement repeats the instructions. No budget counts these bytes, so the gateway must not keep them."""
    endpoint, _ = STREAMS["response"]
    goes_on = asyncio.Event()

    async def announces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        created = {"type": "response.created", "response": {"instructions": "x" * 2 * HELD_BYTES}}
        await response.write(named_event("response.created", orjson.dumps(created)))
        await goes_on.wait()
        return response

    async with running(GivesUp(None, announces)) as gateway:
        url = f"{gateway.url}{endpoint}"
        async with gateway.session.post(url, json=asked(endpoint)) as response:
            first = await asyncio.wait_for(response.content.readany(), 5)
            goes_on.set()
    assert first.startswith(b"event: response.created")


async def test_if_all_pods_give_up_the_client_is_told() -> None:
    for endpoint, events in STREAMS.values():
        pods = [GivesUp(None, streams([b"".join(events)])) for _ in range(2)]
        async with running(*pods) as gateway:
            answer = await gateway.post(asked(endpoint), path=endpoint)
        assert b"gave the answer up" in answer.body
        assert b"[DONE]" not in answer.body
        assert answer.status == 502 or not answer.is_whole


@pytest.mark.parametrize(("endpoint", "body"), WHOLES.values(), ids=WHOLES)
async def test_a_whole_answer_that_was_given_up_is_asked_for_elsewhere(
    endpoint: Endpoint, body: dict[str, Any]
) -> None:
    said = {**body, "stop_reason": "end_turn"}
    if endpoint is Endpoint.RESPONSES:
        said = {**body, "usage": {**body["usage"], "output_tokens": 1}}
    fails = GivesUp(None, answers(200, orjson.dumps(body)))
    other = ScriptedEngine("other", answers(200, orjson.dumps(said)))
    async with running(fails, other) as gateway:
        asks = [gateway.post({**asked(endpoint), "stream": False}, path=endpoint) for _ in range(4)]
        assert [answer.json for answer in await asyncio.gather(*asks)] == [said] * 4
    assert fails.received


@given(st.text(), st.sampled_from(["null", '"length"']))
def test_generated_text_is_no_end(text: str, reason: str) -> None:
    for said in (text, 'data: [DONE]\n\ndata: {"choices":[],"usage":{}}', '{"output_tokens":0,"object":"response"}'):
        choice = b'{"choices":[{"text":%b,"finish_reason":%b}]}' % (orjson.dumps(said), reason.encode())
        kinds = [says(event) for event in events_in(sse_event(choice) + DONE)]
        assert kinds == [Says.TOKEN if reason == "null" and said else kinds[0], Says.END]
        assert kinds[0] in (Says.TOKEN, Says.NOTHING, Says.REASON)
        whole = {"id": "x", "type": "message", "content": [{"type": "text", "text": said}]}
        assert is_cut(orjson.dumps(whole))
        assert not is_cut(orjson.dumps({**whole, "stop_reason": "end_turn"}))


@given(st.binary(max_size=80))
def test_any_bytes_are_judged(data: bytes) -> None:
    for event in events_in(data + b"\n\ndata: " + data + b"\n\n"):
        says(event)
    is_cut(b'{"object":"response","output_tokens":0' + data)


def test_a_message_that_was_asked_for_no_token_is_whole() -> None:
    """Our engine answers in this way to a request that only fills the cache."""
    answer = MessagesAnswer("msg_x", "m", marks=(), fills_context=False, says_nothing=True)
    events = answer.start(0, Usage(10, 0, 4)) + answer.end(Usage(10, 1, 4))
    assert b'"output_tokens":0' in events
    reader = StreamReader(Endpoint.MESSAGES)
    reader.read(events)
    assert reader.has_end
