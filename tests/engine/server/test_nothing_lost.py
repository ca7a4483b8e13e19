"""A text that the template leaves out is refused by its name in the request, at every endpoint that renders chats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.errors import BadRequest
from engine.contract.requests import Endpoint
from engine.server.message_requests import prepare_messages
from engine.server.requests import ModelText, prepare
from engine.server.response_requests import prepare_response
from engine.startup.loaded import LoadedModel
from engine.text.chat import ChatTemplate
from engine.text.exact_numbers import exact_fields, exact_json
from engine.text.rendering import ChatRenderer
from tests.engine.server.conftest import Engine

ONLY_USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "found", "name": "find"}


def with_template(loaded: LoadedModel, source: str) -> ModelText:
    return replace(loaded.text, template=ChatRenderer(ChatTemplate(source, {})))


def prompt_of(model: ModelText, path: str, body: dict[str, Any]) -> str:
    raw = json.dumps(body).encode()
    if path == "/v1/messages":
        job = prepare_messages(model, raw)
    elif path == "/v1/responses":
        job = prepare_response(model, raw)
    else:
        job = prepare(model, Endpoint(path), raw)
    return model.tokenizer.decode(job.prompts[0].tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(
            ("/v1/chat/completions", {"messages": messages, **more}, param)
            for messages, more, param in (
                ([{"role": "developer", "content": "Be brief."}, USER], {}, "messages[0].content"),
                ([{"role": "system", "content": [{"type": "text", "text": "a"}]}, USER], {}, "messages[0].content"),
                ([USER, RESULT], {}, "messages[1].content"),
                ([USER, CALLS], {}, "messages[1].tool_calls[0].function.name"),
                ([{**USER, "name": "Alice"}], {}, "messages[0].name"),
                ([USER], {"tools": [TOOL]}, "tools[0].function.name"),
            )
        ),
        ("/v1/messages", {"max_tokens": 1, "system": "Be brief.", "messages": [USER]}, "system"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [USER, {"role": "system", "content": "a"}, USER]},
            "messages[1].content",
        ),
        ("/v1/responses", {"instructions": "Be brief.", "input": "hi"}, "instructions"),
        ("/v1/responses", {"input": [USER, {"role": "developer", "content": "a"}]}, "input[1].content"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(
    loaded: LoadedModel, path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest, match="would be lost") as error:
        prompt_of(with_template(loaded, ONLY_USERS), path, body)
    assert (error.value.param, error.value.message.startswith(param)) == (param, True)
    assert prompt_of(with_template(loaded, ONLY_USERS), "/v1/chat/completions", {"messages": [USER]}) == "hi"


def test_a_content_that_the_template_cuts_is_refused_by_name(loaded: LoadedModel) -> None:
    model = with_template(loaded, "{% for m in messages %}{{ m.content[:20] }}{% endfor %}")
    prompt_of(model, "/v1/chat/completions", {"messages": [{"role": "user", "content": "of twenty characters"}]})
    with pytest.raises(BadRequest, match="would be lost") as error:
        prompt_of(model, "/v1/chat/completions", {"messages": [USER, {"role": "user", "content": "one two " * 9}]})
    assert error.value.param == "messages[1].content"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_a_variable_that_the_request_itself_sets_is_refused(loaded: LoadedModel, name: str) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {name: []}}
    with pytest.raises(BadRequest) as error:
        prompt_of(loaded.text, "/v1/chat/completions", body)
    assert error.value.param == f"chat_template_kwargs.{name}"


def test_what_is_said_anyway_is_not_missed(loaded: LoadedModel) -> None:
    model = loaded.text
    messages = [{**USER, "name": "user"}, CALLS, RESULT]
    prompt = prompt_of(model, "/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
    assert "found" in prompt
    unused = {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
    assert prompt_of(with_template(loaded, ONLY_USERS), "/v1/chat/completions", unused) == "hi"


async def test_tokenize_loses_nothing_either(engine: Engine) -> None:
    model = replace(engine.service.model, template=ChatRenderer(ChatTemplate(ONLY_USERS, {})))
    engine.state.service = replace(engine.service, model=model)
    status, body = await engine.ask("/tokenize", messages=[USER], tools=[TOOL])
    assert (status, body["error"]["param"]) == (400, "tools[0].function.name")


INTEGERS = st.integers(-(2**200), 2**200) | st.sampled_from([2**63, 2**64, -(2**63) - 1, 2**53 + 1])


@given(number=INTEGERS, as_text=st.booleans())
def test_integers_reach_the_prompt_exactly(loaded: LoadedModel, number: int, as_text: bool) -> None:
    arguments: Any = {"n": number, "deep": [{"m": -number}]}
    call = {"id": "c", "type": "function", "function": {"name": "find"}}
    call["function"] = {"name": "find", "arguments": json.dumps(arguments) if as_text else arguments}
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": number}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    body = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}
    prompt = prompt_of(loaded.text, "/v1/chat/completions", body)
    assert json.dumps(arguments) in prompt
    assert json.dumps(schema) in prompt


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1e400}', '{"a": -1e999}', "[" * 100_000, "{"])
def test_what_is_no_number_of_json_is_refused_by_name(loaded: LoadedModel, text: str) -> None:
    call = {"function": {"name": "find", "arguments": text}}
    with pytest.raises(BadRequest) as error:
        prompt_of(loaded.text, "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert error.value.param == "messages[0].tool_calls[0].function.arguments"


@given(st.recursive(st.none() | st.booleans() | INTEGERS | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_exact_json_reads_what_python_writes(value: Any) -> None:
    body = json.dumps({"a": value}).encode()
    assert exact_json(body) == {"a": value}
    assert exact_fields(body, {"a": value}) == {"a": value}
