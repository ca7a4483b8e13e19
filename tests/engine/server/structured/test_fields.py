"""Answers that follow a schema, an expression, a choice or a grammar: the whole program, with the emulated device."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import orjson
import pytest

from engine.common.sse import SseDecoder
from engine.contract.requests import Endpoint
from tests.engine.server.conftest import SLOW, Engine, Start, wait_until

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 80}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
        "address": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/address"}]},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "minLength": 3},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        }
    },
}
SUM_GBNF = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"\n'
SUM_LARK = 'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"\n'


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


async def said(engine: Engine, **fields: Any) -> tuple[str, str]:
    """Return a chat's text and finish reason."""
    status, body = await engine.ask(Endpoint.CHAT, **(ASK | fields))
    assert status == 200, body
    (choice,) = body["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def pieces_of(engine: Engine, endpoint: Endpoint, **fields: Any) -> list[str]:
    """Return the pieces of a streamed chat or completion."""
    async with engine.post(endpoint, stream=True, **fields) as response:
        assert response.status == 200, await response.text()
        events = [orjson.loads(data) for data in SseDecoder().feed(await response.read()) if data != b"[DONE]"]
    choices = [choice for event in events for choice in event["choices"]]
    return [piece for one in choices if (piece := one["text"] if "text" in one else one["delta"].get("content"))]


async def test_a_chat_follows_a_schema(engine: Engine) -> None:
    for seed in range(8):
        text, finish = await said(engine, response_format=named(PERSON, strict=True), seed=seed)
        jsonschema.validate(json.loads(text), PERSON)
        assert finish == "stop"


async def test_any_object_is_as_long_as_the_request_allows(engine: Engine) -> None:
    for seed in range(4):
        asked = {**ASK, "max_tokens": 120, "response_format": {"type": "json_object"}, "seed": seed}
        status, body = await engine.ask(Endpoint.CHAT, **asked)
        assert status == 200
        assert isinstance(json.loads(body["choices"][0]["message"]["content"]), dict)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert 100 <= body["usage"]["completion_tokens"] <= 120


@pytest.mark.parametrize(
    ("asked", "follows"),
    [
        ({"guided_regex": r"[a-f]{8}-\d{2,4}"}, r"[a-f]{8}-[0-9]{2,4}"),
        ({"structured_outputs": {"regex": r"(yes|no), \w+\."}}, r"(yes|no), \w+\."),
        ({"guided_choice": ["red", "green", 'a "blue"\n']}, r'red|green|a "blue"\n'),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"guided_grammar": SUM_GBNF}, r"[0-9+()]+"),
        ({"structured_outputs": {"grammar": SUM_LARK}}, r"[0-9+()]+"),
        ({"guided_json": json.dumps({"enum": [1, "two", None]})}, r'1|"two"|null'),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": named({"type": "boolean"})}, "true|false"),
    ],
)
async def test_every_way_to_ask(engine: Engine, asked: dict[str, Any], follows: str) -> None:
    for seed in range(3):
        text, finish = await said(engine, **asked, seed=seed)
        assert re.fullmatch(follows, text, re.DOTALL), text
        assert finish == "stop"
        status, body = await engine.ask(Endpoint.COMPLETIONS, prompt="It is", max_tokens=80, seed=seed, **asked)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
        assert re.fullmatch(follows, body["choices"][0]["text"], re.DOTALL)


async def test_responses(engine: Engine) -> None:
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    asked = {"input": "Describe a person.", "max_output_tokens": 80, "text": {"format": form}}
    status, body = await engine.ask(Endpoint.RESPONSES, **asked)
    assert (status, body["status"]) == (200, "completed")
    jsonschema.validate(json.loads(body["output"][0]["content"][0]["text"]), PERSON)
    assert body["text"]["format"] == form
    status, body = await engine.ask(Endpoint.RESPONSES, **(asked | {"text": {"format": {"type": "text"}}}))
    assert (status, body["status"]) == (200, "incomplete"), "plain text goes on as long as it may"


@pytest.mark.parametrize("name", ["output_format", "output_config"])
async def test_messages(engine: Engine, name: str) -> None:
    form = {"type": "json_schema", "schema": PERSON}
    value = form if name == "output_format" else {"format": form, "effort": "low"}
    status, body = await engine.ask(Endpoint.MESSAGES, **ASK, **{name: value})
    assert (status, body["stop_reason"]) == (200, "end_turn")
    jsonschema.validate(json.loads(body["content"][0]["text"]), PERSON)
    messages = {"messages": ASK["messages"], name: value}
    assert (await engine.ask(Endpoint.COUNT_TOKENS, **messages))[0] == 200


async def test_each_choice_follows_on_its_own(engine: Engine) -> None:
    asked = ASK | {"n": 6, "response_format": named(PERSON), "logprobs": True, "top_logprobs": 2, "seed": 3}
    status, body = await engine.ask(Endpoint.CHAT, **asked)
    assert status == 200
    texts = [choice["message"]["content"] for choice in body["choices"]]
    for text, choice in zip(texts, body["choices"], strict=True):
        jsonschema.validate(json.loads(text), PERSON)
        # The stop token is reported, too, as everywhere.
        said = bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
        assert said.startswith(text.encode())
    assert len(set(texts)) > 1


async def test_stop_strings_and_lengths_end_the_text_early(engine: Engine) -> None:
    text, finish = await said(engine, response_format=named(PERSON), stop=['"age"'])
    assert (finish, '"age"' in text) == ("stop", False)
    assert text.startswith('{"name":')
    text, finish = await said(engine, response_format=named(PERSON), max_tokens=3)
    assert finish == "length"


async def test_the_constraint_is_stronger_than_what_would_go_on(engine: Engine) -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 60}, {"ignore_eos": True, "min_tokens": 60}):
        assert await said(engine, guided_choice=["done"], **more) == ("done", "stop")
    status, body = await engine.ask(Endpoint.CHAT, **ASK, guided_regex="(ab)*", min_tokens=20)
    assert status == 200
    assert body["usage"]["completion_tokens"] >= 20
    # A bias that forbids what the constraint needs only makes it less likely.
    ids = list(engine.service.model.tokenizer.encode("done", add_special_tokens=False).ids)
    assert (await said(engine, guided_choice=["done"], logit_bias={str(ids[0]): -100}))[0] == "done"


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
async def test_a_stream_is_resumed(engine: Engine, endpoint: Endpoint) -> None:
    asked = ASK if endpoint is Endpoint.CHAT else {"prompt": "It is", "max_tokens": 80}
    asked = asked | {"response_format": named(PERSON), "seed": 5}
    whole = "".join(await pieces_of(engine, endpoint, **asked))
    jsonschema.validate(json.loads(whole), PERSON)
    for cut in range(1, len(whole), 5):
        rest = "".join(await pieces_of(engine, endpoint, **asked, answer_so_far=whole[:cut]))
        jsonschema.validate(json.loads(whole[:cut] + rest), PERSON)
    status, body = await engine.ask(endpoint, **asked, answer_so_far='{"other":')
    assert (status, body["error"]["param"]) == (400, "answer_so_far")


async def test_what_cannot_be_followed_is_named(engine: Engine) -> None:
    for word, schema in {
        "not": {"not": {"type": "string"}},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "contains": {"type": "array", "contains": {"type": "integer"}},
        "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
        "moon": {"type": "string", "format": "moon"},
    }.items():
        status, body = await engine.ask(Endpoint.CHAT, **ASK, response_format=named(schema))
        assert (status, body["error"]["param"]) == (400, "response_format.json_schema.schema")
        assert word in body["error"]["message"]
    assert engine.held_blocks() == 0


async def test_many_at_once_and_the_metrics(engine: Engine) -> None:
    schemas = [PERSON | {"title": str(i % 4)} for i in range(32)]
    texts = await asyncio.gather(*[said(engine, response_format=named(schema)) for schema in schemas])
    for text, _ in texts:
        jsonschema.validate(json.loads(text), PERSON)
    metrics = await engine.text("/metrics")
    results = dict(re.findall(r'warmroute_constraint_seconds_count\{model_name="tiny",result="(\w+)"\} (\d+)', metrics))
    assert sum(map(int, results.values())) == 32
    for name in ("warmroute_masks_total", "warmroute_mask_seconds_total", "warmroute_mask_wait_seconds_total"):
        (value,) = re.findall(rf"^{name}\{{.*\}} (.*)$", metrics, re.MULTILINE)
        assert float(value) > 0 or name == "warmroute_mask_wait_seconds_total"


async def test_a_client_that_leaves_frees_everything(start: Start) -> None:
    async with start(profile=SLOW) as engine:
        calls = [asyncio.ensure_future(said(engine, response_format=named(PERSON))) for _ in range(6)]
        await wait_until(lambda: engine.held_blocks() > 0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await wait_until(lambda: engine.held_blocks() == 0 and engine.service.loop.open_requests == 0)
        assert await said(engine, guided_choice=["still there"]) == ("still there", "stop")
