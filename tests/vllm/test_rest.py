"""A real vLLM continues the text of another server's answer, at `/v1/responses`, and as a chat for `/v1/messages`."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from engine.common.sse import SseDecoder, named_event
from engine.contract.requests import Endpoint
from router.continuing.as_chat import chat_of
from router.continuing.continuations import Continuation
from router.continuing.resume import ask, continuation_of, rewriter_of
from router.continuing.transcript import SentEvents, Transcript
from tests.vllm.servers import MODEL, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

QUESTION = "What does the handbook of the harbour say about berth 4?"
SO_FAR = "The handbook says that berth 4"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "stream": True}


async def streamed(http: aiohttp.ClientSession, url: str, body: bytes) -> list[dict[str, Any]]:
    async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 200, await answer.text()
        return [orjson.loads(data) for data in SseDecoder().feed(await answer.read()) if data != b"[DONE]"]


def said(events: list[dict[str, Any]], text: str) -> tuple[bytes, Transcript]:
    """Return the beginning of a response up to its first delta, as if that delta had been `text`."""
    sent = b""
    for event in events:
        is_delta = event["type"] == "response.output_text.delta"
        sent += named_event(event["type"], orjson.dumps({**event, "delta": text} if is_delta else event))
        if is_delta:
            break
    record = SentEvents(Endpoint.RESPONSES, lambda size: True)
    record.add(sent)
    return sent, record.read()


async def test_a_response_goes_on_as_a_chat_does(servers: list[VllmServer]) -> None:
    """Response and chat are greedy, so they have the same text for the same prompt tokens. Events continue in order."""
    fields = {"model": MODEL, "input": QUESTION, "max_output_tokens": 13, **GREEDY}
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": SO_FAR}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 12, "continue_final_message": True, **GREEDY}
    chat |= {"add_generation_prompt": False, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession() as http:
        (card,) = (await (await http.get(f"{servers[0].url}/v1/models")).json())["data"]
        whole = await streamed(http, servers[0].url + Endpoint.RESPONSES, orjson.dumps(fields))
        sent, so_far = said(whole, SO_FAR)
        way = continuation_of(card, Endpoint.RESPONSES, fields, so_far)
        assert way is Continuation.MESSAGE
        url = servers[1].url
        rest = await streamed(http, url + Endpoint.RESPONSES, ask(Endpoint.RESPONSES, fields, so_far, way))
        told = await streamed(http, url + Endpoint.CHAT, orjson.dumps(chat))
    text = "".join(event["delta"] for event in rest if event["type"] == "response.output_text.delta")
    in_chat = "".join(choice["delta"].get("content") or "" for event in told for choice in event["choices"])
    assert text == in_chat
    assert len(text) > 12
    assert rest[-1]["response"]["usage"]["input_tokens"] == told[-1]["usage"]["prompt_tokens"]
    rewriter = rewriter_of(Endpoint.RESPONSES, so_far, way, whole[-1]["response"]["usage"]["input_tokens"])
    body = b"".join(named_event(event["type"], orjson.dumps(event)) for event in rest)
    seen = [orjson.loads(data) for data in SseDecoder().feed(sent + rewriter.feed(body))]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    last = seen[-1]["response"]
    assert (seen[-1]["type"], last["id"]) == ("response.completed", whole[0]["response"]["id"])
    assert last["output"][0]["content"][0]["text"] == SO_FAR + text
    assert last["usage"]["input_tokens"] == whole[-1]["response"]["usage"]["input_tokens"]


def text_of(answer: dict[str, Any]) -> tuple[str, int]:
    """Return the text of a whole answer at either API, and its prompt tokens."""
    usage = answer["usage"]
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"], usage["prompt_tokens"]
    read = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return answer["content"][0]["text"], usage["input_tokens"] + read


async def test_the_chat_that_stands_for_a_message_is_the_one_that_vllm_makes(servers: list[VllmServer]) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: 7"}
    blocks = [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]
    system = [billing, *({**block, "cache_control": {"type": "ephemeral"}} for block in blocks)]
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": blocks[:1]},
        {"role": "user", "content": QUESTION},
    ]
    shared = {"model": MODEL, "max_tokens": 12, "temperature": 0.0}
    async with aiohttp.ClientSession() as http:
        for fields in (
            {"messages": turns[-1:]},
            {"system": system, "messages": turns},
            {"system": "S", "messages": turns},
        ):
            async with http.post(servers[0].url + Endpoint.MESSAGES, json={**shared, **fields}) as answer:
                told = text_of(await answer.json())
            async with http.post(
                servers[1].url + Endpoint.CHAT, json={**shared, "messages": chat_of(fields)}
            ) as answer:
                assert text_of(await answer.json()) == told


async def test_a_message_of_the_assistant_at_the_end_is_a_turn_of_its_own(servers: list[VllmServer]) -> None:
    """Therefore the gateway requests the rest of a message as a chat. If this test fails, that is no
    longer needed."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": SO_FAR}]
    shared = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0.0}
    async with aiohttp.ClientSession() as http:
        async with http.post(servers[0].url + Endpoint.MESSAGES, json=shared) as answer:
            _, told = text_of(await answer.json())
        goes_on = {"continue_final_message": True, "add_generation_prompt": False}
        async with http.post(servers[0].url + Endpoint.CHAT, json={**shared, **goes_on}) as answer:
            _, continued = text_of(await answer.json())
    assert told > continued
