"""Which fields the engine refuses, by which status and name; and which it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.startup.loaded import LoadedModel
from tests.engine.server.conftest import MODEL, Engine, Start

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGE = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
TOOL = {"type": "function", "function": {"name": "find"}}
BIG = 10**18


def messages(*more: object) -> dict[str, Any]:
    return {"messages": [MESSAGE, *more]}


def call(arguments: object) -> dict[str, Any]:
    return messages({"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": arguments}}]})


BOTH: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"model": 3}, "model"),
    ("temperature", {"temperature": -0.1}, "temperature"),
    ("temperature text", {"temperature": "1"}, "temperature"),
    ("temperature true", {"temperature": True}, "temperature"),
    ("top_p", {"top_p": 0}, "top_p"),
    ("top_p", {"top_p": 1.01}, "top_p"),
    ("top_k", {"top_k": -2}, "top_k"),
    ("top_k huge", {"top_k": BIG}, "top_k"),
    ("min_p", {"min_p": 2}, "min_p"),
    ("repetition_penalty", {"repetition_penalty": 0}, "repetition_penalty"),
    ("repetition_penalty tiny", {"repetition_penalty": 0.0099}, "repetition_penalty"),
    ("presence_penalty", {"presence_penalty": 2.1}, "presence_penalty"),
    ("frequency_penalty", {"frequency_penalty": -2.1}, "frequency_penalty"),
    ("seed", {"seed": 1.5}, "seed"),
    ("seed huge", {"seed": 2**63}, "seed"),
    ("stop number", {"stop": 3}, "stop"),
    ("stop empty", {"stop": ["a", ""]}, "stop[1]"),
    ("stop many", {"stop": ["a"] * 17}, "stop"),
    ("stop_token_ids", {"stop_token_ids": [BIG]}, "stop_token_ids"),
    ("stop_token_ids text", {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ("stop_token_ids negative", {"stop_token_ids": [-1]}, "stop_token_ids"),
    ("ignore_eos", {"ignore_eos": "yes"}, "ignore_eos"),
    ("n zero", {"n": 0}, "n"),
    ("n many", {"n": 17}, "n"),
    ("max_tokens zero", {"max_tokens": 0}, "max_tokens"),
    ("max_tokens real", {"max_tokens": 1.5}, "max_tokens"),
    ("max_tokens huge", {"max_tokens": BIG}, "max_tokens"),
    ("max_tokens over context", {"max_tokens": 4096}, "max_tokens"),
    ("logit_bias id", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("logit_bias range", {"logit_bias": {str(BIG): 1}}, "logit_bias"),
    ("logit_bias vocabulary", {"logit_bias": {"999999": 1}}, "logit_bias"),
    ("logit_bias value", {"logit_bias": {"1": 101}}, "logit_bias.1"),
    ("stream", {"stream": 1}, "stream"),
    ("stream_options alone", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("stream_options field", {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ("cache_salt", {"cache_salt": 1}, "cache_salt"),
    ("user", {"user": 1}, "user"),
    ("metadata", {"metadata": "x"}, "metadata"),
    ("unknown", {"temprature": 1}, "temprature"),
    *(
        (name, {name: value}, name)
        for name, value in {
            "best_of": 2,
            "suffix": "end",
            "audio": {},
            "functions": [TOOL],
            "function_call": {"name": "find"},
            "modalities": ["audio"],
            "prediction": {},
            "web_search_options": {},
            "bad_words": ["x"],
            "allowed_token_ids": [1],
            "use_beam_search": True,
            "truncate_prompt_tokens": 3,
            "include_stop_str_in_output": True,
            "min_tokens": 5000,
            "skip_special_tokens": "no",
        }.items()
    ),
]
CONSTRAINTS: list[tuple[str, dict[str, Any], str]] = [
    ("form", {"response_format": "json"}, "response_format"),
    ("form type", {"response_format": {}}, "response_format.type"),
    ("form tag", {"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ("form field", {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    (
        "no schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ("schema number", {"guided_json": 3}, "guided_json"),
    ("schema text", {"guided_json": "{"}, "guided_json"),
    ("schema word", {"guided_json": {"not": {}}}, "guided_json"),
    ("schema type", {"guided_json": {"type": "strong"}}, "guided_json"),
    ("schema false", {"guided_json": False}, "guided_json"),
    ("schema reference", {"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
    ("schema circle", {"guided_json": {"$ref": "#"}}, "guided_json"),
    ("look-around", {"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "guided_json"),
    ("regex", {"guided_regex": "(a"}, "guided_regex"),
    ("regex empty", {"guided_regex": ""}, "guided_regex"),
    ("choice", {"guided_choice": []}, "guided_choice"),
    ("choice number", {"guided_choice": ["a", 3]}, "guided_choice[1]"),
    ("grammar", {"guided_grammar": 'root ::= "a" b'}, "guided_grammar"),
    ("lark", {"guided_grammar": 'start: "a" b'}, "guided_grammar"),
    ("large", {"guided_regex": "a" * 300_000}, "guided_regex"),
    ("two", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ("two at once", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ("nothing", {"structured_outputs": {}}, "structured_outputs"),
    ("entry", {"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    (
        "white space",
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
]
ONLY_CHAT: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": None}, "messages"),
    ("empty messages", {"messages": []}, "messages"),
    ("messages text", {"messages": "hi"}, "messages"),
    ("message text", messages("hi"), "messages[1]"),
    ("role", messages({"role": "robot", "content": ""}), "messages[1].role"),
    ("role number", messages({"role": 1, "content": ""}), "messages[1].role"),
    ("content", messages({"role": "user"}), "messages[1].content"),
    ("content number", messages({"role": "user", "content": 1}), "messages[1].content"),
    ("image", messages({"role": "user", "content": [IMAGE]}), "messages[1].content[0].type"),
    ("part", messages({"role": "user", "content": ["x"]}), "messages[1].content[0]"),
    ("part text", messages({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
    ("message field", messages({**MESSAGE, "weight": 1}), "messages[1].weight"),
    ("message audio", messages({**MESSAGE, "audio": {"id": "x"}}), "messages[1].audio"),
    ("name", messages({**MESSAGE, "name": 1}), "messages[1].name"),
    ("tool_calls", messages({**MESSAGE, "tool_calls": {"a": 1}}), "messages[1].tool_calls"),
    ("call", messages({**MESSAGE, "tool_calls": [1]}), "messages[1].tool_calls[0].function.name"),
    ("arguments", call("{"), "messages[1].tool_calls[0].function.arguments"),
    ("arguments list", call("[]"), "messages[1].tool_calls[0].function.arguments"),
    ("tools", {"tools": {}}, "tools"),
    ("tool", {"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ("tool name", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("tool_choice", {"tool_choice": "required"}, "tool_choice"),
    (
        "tool_choice named",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ("logprobs number", {"logprobs": 3}, "logprobs"),
    ("top_logprobs alone", {"top_logprobs": 3}, "top_logprobs"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("two max_tokens", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("max_completion_tokens", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("chat_template_kwargs", {"chat_template_kwargs": []}, "chat_template_kwargs"),
    ("prompt", {"prompt": "x"}, "prompt"),
    ("echo", {"echo": True}, "echo"),
    ("over-long", {"messages": [{"role": "user", "content": "a b " * 5000}]}, "messages"),
]
ONLY_TEXT: list[tuple[str, dict[str, Any], str]] = [
    ("no prompt", {"prompt": None}, "prompt"),
    ("prompt number", {"prompt": 1}, "prompt"),
    ("prompt empty text", {"prompt": ""}, "prompt"),
    ("prompt empty", {"prompt": []}, "prompt"),
    ("prompt empty inside", {"prompt": [[]]}, "prompt"),
    ("prompt mixed", {"prompt": ["a", 1]}, "prompt"),
    ("prompt true", {"prompt": [True]}, "prompt"),
    ("prompt id", {"prompt": [1, 999_999]}, "prompt"),
    ("prompt negative id", {"prompt": [-1]}, "prompt"),
    ("prompt huge id", {"prompt": [BIG]}, "prompt"),
    ("over-long", {"prompt": [1] * 4096}, "prompt"),
    ("logprobs true", {"logprobs": True}, "logprobs"),
    ("logprobs", {"logprobs": 21}, "logprobs"),
    ("many prompts", {"prompt": ["a"] * 33, "n": 2}, "n"),
    ("messages", {"messages": [MESSAGE]}, "messages"),
]
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = [
    *((CHAT, {"messages": [MESSAGE]}, *case) for case in BOTH + CONSTRAINTS + ONLY_CHAT),
    *((TEXT, {"prompt": "hi"}, *case) for case in BOTH + CONSTRAINTS + ONLY_TEXT),
]


async def test_every_refusal_is_a_400_that_names_the_field(engine: Engine) -> None:
    """One engine and one test serve the whole table, because each line takes only a millisecond."""
    wrong: list[tuple[Any, ...]] = []
    for path, base, name, change, param in CASES:
        status, body = await engine.ask(path, **{"model": MODEL, **base, **change})
        error = body.get("error", {})
        if (status, error.get("param"), error.get("type")) != (400, param, "invalid_request_error"):
            wrong.append((path, name, status, body))
        elif not error["message"]:
            wrong.append((path, name, "no message"))
    assert not wrong


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "text"}, "store": False, "modalities": ["text"], "service_tier": "auto"}),
        (CHAT, {"audio": None, "functions": [], "function_call": "none", "logit_bias": None, "tools": []}),
        (CHAT, {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "prompt_cache_key": "k"}),
        (CHAT, {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.1, "seed": -5}),
        (CHAT, {"temperature": 1e-300, "repetition_penalty": 0.01}),
        (CHAT, {"stop": None, "stop_token_ids": [1], "ignore_eos": True, "logit_bias": {"5": -100}}),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 2, "n": 2, "cache_salt": "tenant"}),
        (CHAT, {"model": None, "chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "none"}),
        (TEXT, {"best_of": 1, "suffix": None, "echo": False, "logprobs": None}),
        (TEXT, {"prompt": [[1, 2], [3]], "logprobs": 0}),
    ],
)
async def test_fields_that_ask_for_nothing_special_are_taken(engine: Engine, path: str, fields: dict[str, Any]) -> None:
    base = {"messages": [MESSAGE]} if path == CHAT else {"prompt": "hi"}
    status, body = await engine.ask(path, **{"model": MODEL, "max_tokens": 2, **base, **fields})
    assert (status, body.get("error")) == (200, None)


async def test_messages_say_what_to_do(engine: Engine) -> None:
    async def message(**fields: Any) -> str:
        _, body = await engine.ask(CHAT, **{"messages": [MESSAGE], **fields})
        return str(body["error"]["message"])

    assert "did you mean 'temperature'" in await message(temprature=1)
    assert "'tiny'" in await message(model="other")
    assert "greater than or equal to 0.01; got 1e-40" in await message(repetition_penalty=1e-40)
    assert "4096" in await message(max_tokens=4090)
    assert "max_tokens is 4090" in await message(max_tokens=4090)
    assert "maximum context length is 4096 tokens" in await message(
        messages=[{"role": "user", "content": "a b " * 5000}]
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b'{"a": "\\ud800"}'])
async def test_a_body_that_is_no_json_object_is_a_400(engine: Engine, body: bytes) -> None:
    async with engine.http.post(engine.url + CHAT, data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_a_body_that_does_not_decompress_is_a_400(
    engine: Engine, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with engine.http.post(engine.url + path, data=b'{"prompt": "hi"}', headers=broken) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert "body" in error["message"]
        assert response.headers["Connection"] == "close"
    assert (await engine.ask("/tokenize", prompt="hi"))[0] == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize"])
async def test_a_body_that_does_not_come_is_a_400(engine: Engine, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.http.wire.BODY_TIMEOUT_S", 0.1)
    leave = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await leave.wait()

    async with engine.http.post(engine.url + path, data=body()) as response:
        assert response.status == 400
        assert "did not arrive" in (await response.json())["error"]["message"]
        leave.set()


async def test_another_model_is_a_404(engine: Engine) -> None:
    status, body = await engine.ask(CHAT, model="other", messages=[MESSAGE])
    assert (status, body["error"]["param"], body["error"]["code"]) == (404, "model", "model_not_found")


async def test_unknown_routes_and_methods_have_the_error_shape(engine: Engine) -> None:
    for method, path, status in (("GET", "/v2/none", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        async with engine.http.request(method, engine.url + path) as response:
            assert response.status == status
            assert path in (await response.json())["error"]["message"]
            assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(TEXT, {"prompt": "hi"}, "prompt"), (TEXT, {"prompt": ["h", "hi"]}, "prompt"), (CHAT, messages(), "messages")],
)
async def test_a_text_with_a_token_that_the_model_lacks_is_refused(
    start: Start, loaded: LoadedModel, path: str, fields: dict[str, Any], param: str
) -> None:
    """A tokenizer may have more tokens than the model embeds. On a card the step would fail, with all its requests."""
    ids = loaded.text.tokenizer.encode("hi", add_special_tokens=True).ids
    async with start() as engine:
        service = engine.service
        engine.state.service = replace(service, model=replace(service.model, vocab_size=max(ids)))
        status, body = await engine.ask(path, **fields)
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "invalid_value")
        assert f"{param}: token id " in body["error"]["message"]
        assert f"is out of range; the model has {max(ids)} tokens" in body["error"]["message"]
        assert engine.service.scheduler.stats().failed_steps == 0
