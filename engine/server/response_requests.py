"""Turns the body of `/v1/responses` into a sequence for the scheduler. Pure work for a thread: nothing here waits.

The engine takes a subset: text and calls of functions, and no stored answers. Each other field is refused by name.
Field meanings: https://platform.openai.com/docs/api-reference/responses/create; top_k, min_p, repetition_penalty, seed,
logit_bias, stop_token_ids, ignore_eos, cache_salt, answer_so_far and chat_template_kwargs are those of the other
endpoints (`fields.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.contract.errors import ApiError, BadRequest, quoted
from engine.contract.keys import canonical_chat, compact_json
from engine.contract.requests import parse_body
from engine.contract.responses import response_messages, response_tools
from engine.grammar.asked import text_format
from engine.server.fields import (
    IGNORED,
    GenerationFields,
    OpenAiFields,
    StreamOptions,
    parse_fields,
    shared,
)
from engine.server.marks import kept_marks
from engine.server.messages import tool_use
from engine.server.rendered import render_chat
from engine.server.requests import (
    GenerationJob,
    ModelText,
    Prompt,
    check_model,
    encode_prompt,
    keys_of,
    make_job,
    own_variables,
    room_for,
    with_answer_so_far,
)
from engine.server.response_items import check_items, turns_of
from engine.server.tools import chat_choice, check_response_tools, reading_of
from engine.text.key_spans import chat_spans

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
}
"""Fields of the API that this engine refuses, with the values that it accepts because they have no effect. Null is
always accepted."""
_IGNORED = {**IGNORED, "max_tool_calls": (), "truncation": ("disabled",)}
"""`store`: the answer is the same, and a later `previous_response_id` gets 404. `truncation`: a conversation that does
not fit the context gets 400, and any other has the same answer."""
_LOGPROBS = "message.output_text.logprobs"
_VARIABLES = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}
"""Variable of chat templates -> the field that gives its value."""
_Anything = Any
_Word = Annotated[str, Field(max_length=64)]


class Reasoning(BaseModel):
    """`reasoning`. Only the effort can change an answer: reasoning is given as it is, not summed up."""

    model_config = ConfigDict(extra="forbid", strict=True)
    effort: _Word | None = None
    summary: _Word | None = None
    generate_summary: _Word | None = None


class TextForm(BaseModel):
    """`text`. `engine.grammar.asked` reads `format`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: _Anything = None
    verbosity: _Word | None = None


class ResponsesFields(OpenAiFields):
    """The fields of the body. None: not given."""

    input: _Anything
    reasoning: Reasoning | None = None
    text: TextForm | None = None
    include: list[_Word] | None = Field(None, max_length=64)
    """Further parts of the answer. The engine makes none of them, so it ignores them, but for log-probabilities."""
    stream_options: StreamOptions | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[_Anything] | None = None
    tool_choice: _Anything = None
    parallel_tool_calls: bool | None = None


class NotKept(ApiError):
    """404: this engine keeps no responses."""

    status = 404
    type = "invalid_request_error"


def prepare_response(model: ModelText, body: bytes) -> GenerationJob:
    """Return the job in `body`. Raises BadRequest naming the field at fault, ModelNotFound and NotKept."""
    fields = parse_fields(ResponsesFields, parse_body(body), REFUSED, _IGNORED)
    check_model(model, fields.model)
    if fields.previous_response_id is not None:
        raise NotKept(
            f"Previous response with id {quoted(fields.previous_response_id)} not found: this engine keeps no "
            "responses; send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    check_items(fields.input)
    check_response_tools(fields.tools)
    tools = response_tools(fields.tools or ())
    choice = chat_choice(fields.tool_choice, tools, fields.parallel_tool_calls)
    variables, ignored = _variables(model, fields)
    messages = response_messages(fields.instructions, fields.input)
    turns, places = turns_of(messages, fields)
    rendered = render_chat(
        model,
        turns,
        tools,
        variables | (fields.chat_template_kwargs or {}),
        places=places,
        salt=fields.cache_salt,
        may_call=choice.kind != "none",
    )
    text = rendered.text
    encoded = encode_prompt(model, text, "input", fields.cache_salt, add_special_tokens=False)
    keys = keys_of(model, canonical_chat(messages, tools), fields.cache_salt)
    spans = chat_spans(keys, model.stride, messages, tools, text, encoded.ends)
    room = room_for(model, len(encoded.ids), None, "input")
    meant = GenerationFields(**shared(fields, OpenAiFields))
    limit = model.answer_limit(room if fields.max_output_tokens is None else min(fields.max_output_tokens, room))
    kept = kept_marks(model, meant, (), len(encoded.ids))
    told = _told(fields)
    compact_json({"response": told}, "metadata")  # nested as in an event: what cannot be written fails now
    sampled = {
        name: model.sampling.get(name, 1.0) if (value := getattr(fields, name)) is None else value
        for name in ("temperature", "top_p")
    }
    reading = reading_of(model, tools, choice, text, is_beginning=not fields.answer_so_far, salt=fields.cache_salt)
    use = tool_use(messages, may_be_called=bool(tools) and choice.kind != "none")
    prompt = Prompt(encoded.ids, spans, limit, None, marks=kept, tools=use, reading=reading)
    prompt = with_answer_so_far(model, meant, prompt)
    ignored = [*fields.ignored, *ignored, *rendered.ignored]
    job = make_job(model, meant, (prompt,), None, told=told | sampled, ignored=ignored)
    return replace(job, constraint=text_format(None if fields.text is None else fields.text.format, "text.format"))


def _variables(model: ModelText, fields: ResponsesFields) -> tuple[dict[str, Any], list[str]]:
    """Return the variables of the chat template, and the names of the fields of the answer's form without effect.

    Raises BadRequest for a form that the engine does not make.
    """
    reasoning, form = fields.reasoning or Reasoning(), fields.text or TextForm()
    included = fields.include or []
    if _LOGPROBS in included:
        raise _bad("include", f"{_LOGPROBS} is not supported by this engine", True)
    read, unread = own_variables(model, {"reasoning_effort": reasoning.effort, "verbosity": form.verbosity})
    ignored = [_VARIABLES[name] for name in unread]
    ignored += [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(reasoning, name) is not None]
    ignored += ["include"] * bool(included)
    options = fields.stream_options or StreamOptions()
    if options.include_usage is not None or options.continuous_usage_stats is not None:
        raise _bad("stream_options", "has only include_obfuscation here: every stream ends with its usage")
    return read, ignored + ["stream_options.include_obfuscation"] * bool(options.include_obfuscation)


def _told(fields: ResponsesFields) -> dict[str, Any]:
    """Return the fields of the request that its answer repeats."""
    told = {name: getattr(fields, name) for name in ("instructions", "max_output_tokens", "metadata", "user")}
    if fields.reasoning is not None:
        told["reasoning"] = {"effort": fields.reasoning.effort, "summary": None}
    if (form := fields.text) is not None and (form.verbosity is not None or form.format is not None):
        told["text"] = {"format": form.format or {"type": "text"}}
        if form.verbosity is not None:
            told["text"]["verbosity"] = form.verbosity
    if fields.tools:
        told |= {"tools": fields.tools, "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice}
    if fields.parallel_tool_calls is not None:
        told["parallel_tool_calls"] = fields.parallel_tool_calls
    return told


def _bad(param: str, message: str, is_unsupported: bool = False) -> BadRequest:
    code = "unsupported_parameter" if is_unsupported else "invalid_value"
    return BadRequest(f"{param} {message}", param=param, code=code)
