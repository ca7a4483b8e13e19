"""Turns the body of `/v1/responses` into a sequence for the scheduler. Pure work for a thread: nothing here waits.

The engine takes a subset: text in, text out, and no stored answers. Each other field is refused by name.
Field meanings: https://platform.openai.com/docs/api-reference/responses/create; top_k, min_p, repetition_penalty, seed,
logit_bias, stop_token_ids, ignore_eos, cache_salt, answer_so_far and chat_template_kwargs are those of the other
endpoints (`fields.py`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.contract.errors import ApiError, BadRequest, quoted
from engine.contract.keys import canonical_chat, compact_json
from engine.contract.requests import MAX_LISTED, parse_body
from engine.contract.responses import response_messages
from engine.grammar.asked import text_format
from engine.server.fields import (
    IGNORED,
    GenerationFields,
    OpenAiFields,
    StreamOptions,
    check_number,
    parse_fields,
    shared,
)
from engine.server.marks import kept_marks
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
from engine.text.key_spans import chat_spans

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
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
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text")
_ITEM = ("type", "role", "content", "id", "status", "phase")
_Anything = Any
_Word = Annotated[str, Field(max_length=64)]


class Reasoning(BaseModel):
    """`reasoning`. Only the effort can change an answer: it has no reasoning that could be summed up."""

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
    parallel_tool_calls: bool | None = None
    """Harmless: it has no effect on the answer."""


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
    _check_input(fields.input)
    variables, ignored = _variables(model, fields)
    messages = response_messages(fields.instructions, fields.input)
    places = ["input"] if isinstance(fields.input, str) else [f"input[{i}].content" for i in range(len(fields.input))]
    if fields.instructions is not None:
        places.insert(0, "instructions")
    rendered = render_chat(model, messages, None, variables | (fields.chat_template_kwargs or {}), places=places)
    text = rendered.text
    encoded = encode_prompt(model, text, "input", fields.cache_salt, add_special_tokens=False)
    keys = keys_of(model, canonical_chat(messages), fields.cache_salt)
    spans = chat_spans(keys, model.stride, messages, None, text, encoded.ends)
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
    prompt = with_answer_so_far(model, meant, Prompt(encoded.ids, spans, limit, None, marks=kept))
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
    return told


def _check_input(given: object) -> None:
    """Check `input`. Raises BadRequest naming the item that is not text."""
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LISTED:
        raise _bad("input", f"must be a string, or a list of 1 to {MAX_LISTED} items")
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise _bad(where, "must be an object")
        if (kind := item.get("type", "message")) != "message":
            raise _bad(f"{where}.type", f"{_named(kind)} is not supported: this engine reads messages only", True)
        if item.get("role") not in _ROLES:
            raise _bad(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        for name in item.keys() - set(_ITEM):
            raise _bad(f"{where}.{name}", "is not a field of a message", True)
        _check_content(item.get("content"), f"{where}.content")


def _check_content(content: object, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _bad(where, "must be a string or a list of text parts")
    check_number(content, where)
    for j, part in enumerate(content):
        if not isinstance(part, dict):
            raise _bad(f"{where}[{j}]", "must be an object with a 'type'")
        if (kind := part.get("type")) not in _TEXTS:
            raise _bad(f"{where}[{j}].type", f"{_named(kind)} is not supported: this engine reads text only", True)
        if not isinstance(part.get("text"), str):
            raise _bad(f"{where}[{j}].text", "must be a string")


def _named(kind: object) -> str:
    """Return how an error message shows a `type` that a client sent. Python cannot write the most deeply nested values
    that JSON holds."""
    return repr(kind[:40]) if isinstance(kind, str) else reprlib.repr(kind)


def _bad(param: str, message: str, is_unsupported: bool = False) -> BadRequest:
    code = "unsupported_parameter" if is_unsupported else "invalid_value"
    return BadRequest(f"{param} {message}", param=param, code=code)
