"""Turns the body of `/v1/messages` into a sequence for the scheduler. Pure work for a thread: nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat
from engine.contract.messages import chat_messages, is_billing
from engine.contract.requests import parse_body
from engine.grammar.asked import text_format
from engine.grammar.constraint import Constraint
from engine.server.fields import GenerationFields, SharedFields, check_number, parse_at, parse_fields, shared
from engine.server.marks import Place, check_count, kept_marks, marks_at
from engine.server.message_fields import (
    REFUSED,
    CountFields,
    Message,
    MessagesFields,
    OutputConfig,
    check_content,
)
from engine.server.rendered import render_chat
from engine.server.requests import (
    GenerationJob,
    ModelText,
    Prompt,
    check_length,
    check_model,
    encode_prompt,
    keys_of,
    make_job,
    own_variables,
    room_for,
    with_answer_so_far,
)
from engine.text.key_spans import chat_spans


@dataclass(frozen=True, slots=True)
class _Chat:
    """A rendered conversation."""

    messages: list[dict[str, Any]]
    text: str
    marks: list[Place]
    ignored: tuple[str, ...]


def prepare_messages(model: ModelText, body: bytes) -> GenerationJob:
    """Return the job in `body`. Raises ModelNotFound, or BadRequest naming the field at fault."""
    fields = parse_fields(MessagesFields, parse_body(body), REFUSED)
    check_model(model, fields.model)
    chat = _chat(model, fields)
    encoded = encode_prompt(model, chat.text, "messages", fields.cache_salt, add_special_tokens=False)
    marks = marks_at(chat.marks, chat.messages, None, chat.text, encoded)
    keys = keys_of(model, canonical_chat(chat.messages), fields.cache_salt)
    spans = chat_spans(keys, model.stride, chat.messages, None, chat.text, encoded.ends)
    room = room_for(model, len(encoded.ids), None, "messages")
    meant = GenerationFields(**shared(fields, SharedFields), stop=list(fields.stop_sequences or ()))
    limit = model.answer_limit(fields.max_tokens)
    prompt = Prompt(
        encoded.ids,
        spans,
        max(1, min(limit, room)),
        None,
        marks=kept_marks(model, meant, marks, len(encoded.ids)),
        fills_context=limit > room,
    )
    prompts = (with_answer_so_far(model, meant, prompt),)
    ignored = (*fields.ignored, *chat.ignored)
    job = make_job(model, meant, prompts, None, says_nothing=not fields.max_tokens, ignored=ignored)
    return job if job.says_nothing else replace(job, constraint=_output_form(fields))


def _output_form(fields: CountFields) -> Constraint | None:
    """Return what the answer must follow. Raises BadRequest."""
    config = fields.output_config or OutputConfig()
    if fields.output_format is not None and config.format is not None:
        raise BadRequest("output_format is output_config.format's former name: give one of them", param="output_format")
    if config.format is not None:
        return text_format(config.format, "output_config.format")
    return text_format(fields.output_format, "output_format")


def count_tokens(model: ModelText, body: bytes) -> int:
    """Return the number of prompt tokens of the messages in `body`. Raises BadRequest, ModelNotFound."""
    fields = parse_fields(CountFields, parse_body(body), REFUSED)
    check_model(model, fields.model)
    text = _chat(model, fields).text
    check_length(model, text, "messages")
    # The token cache is not used, because this request names no salt.
    return len(model.tokenizer.encode(text, add_special_tokens=False).ids)


def _chat(model: ModelText, fields: CountFields) -> _Chat:
    marks = _marks(fields)
    messages = chat_messages(fields.system, fields.messages)
    goes_on = messages[-1]["role"] == "assistant"
    places = [f"messages[{i}].content" for i in range(len(fields.messages))]
    if fields.system is not None:
        places.insert(0, "system")
    effort = None if fields.output_config is None else fields.output_config.effort
    own, unread = own_variables(model, {"reasoning_effort": effort})
    variables = own | (fields.chat_template_kwargs or {})
    rendered = render_chat(model, messages, None, variables, places=places, goes_on=goes_on)
    ignored = ("output_config.effort",) * len(unread)
    return _Chat(messages, rendered.text, marks, (*ignored, *rendered.ignored))


def _marks(fields: CountFields) -> list[Place]:
    """Return the ends of the prefixes to keep, in ascending order. Raises BadRequest for unsupported content."""
    found: list[Place] = []
    first = 0
    if fields.system is not None:
        marks = check_content(fields.system, "system")
        gone = [is_billing(block) for block in fields.system] if isinstance(fields.system, list) else []
        found += [Place(0, parts - sum(gone[:parts]), mark.lifetime_s) for parts, mark in marks]
        first = 1
    check_number(fields.messages, "messages")
    for i, message in enumerate(fields.messages, start=first):
        where = f"messages[{i - first}]"
        content = parse_at(Message, message, where).content
        found += [Place(i, parts, mark.lifetime_s) for parts, mark in check_content(content, f"{where}.content")]
    if fields.cache_control is not None:
        last = Place(i, _parts(fields.messages[-1]["content"]), fields.cache_control.lifetime_s)
        found = [mark for mark in found if (mark.message, mark.parts) != (last.message, last.parts)] + [last]
    check_count(found)
    return found


def _parts(content: str | Sequence[Any]) -> int:
    return 1 if isinstance(content, str) else len(content)
