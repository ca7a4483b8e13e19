"""Turns the body of `/v1/messages` into a sequence for the scheduler. Pure work for a thread: nothing here waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat
from engine.contract.messages import CACHE_CONTROL, chat_messages, chat_tools, is_billing
from engine.contract.requests import parse_body
from engine.grammar.asked import text_format
from engine.grammar.constraint import Constraint
from engine.server.fields import GenerationFields, SharedFields, check_number, parse_at, parse_fields, shared
from engine.server.marks import CacheControl, Place, check_count, kept_marks, marks_at
from engine.server.message_fields import (
    REFUSED,
    CountFields,
    Message,
    MessagesFields,
    OutputConfig,
    check_content,
)
from engine.server.messages import tool_use
from engine.server.rendered import Ending, render_chat
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
    thinking_variables,
    with_answer_so_far,
)
from engine.server.tools import ToolChoice, check_message_tools, message_choice, reading_of
from engine.text.exact_numbers import exact_json
from engine.text.key_spans import THOUGHTS, chat_spans


@dataclass(frozen=True, slots=True)
class _Chat:
    """A rendered conversation."""

    messages: list[dict[str, Any]]
    """The chat that is equivalent to the request, from which prefix keys are made."""
    tools: list[Mapping[str, Any]]
    choice: ToolChoice
    text: str
    marks: list[Place]
    ignored: tuple[str, ...]


def prepare_messages(model: ModelText, body: bytes) -> GenerationJob:
    """Return the job in `body`. Raises ModelNotFound, or BadRequest naming the field at fault."""
    fields = parse_fields(MessagesFields, parse_body(body), REFUSED)
    check_model(model, fields.model)
    chat = _chat(model, fields)
    encoded = encode_prompt(model, chat.text, "messages", fields.cache_salt, add_special_tokens=False)
    marks = marks_at(chat.marks, chat.messages, chat.tools, chat.text, encoded)
    keys = keys_of(model, canonical_chat(chat.messages, chat.tools), fields.cache_salt)
    spans = chat_spans(keys, model.stride, chat.messages, chat.tools, chat.text, encoded.ends)
    room = room_for(model, len(encoded.ids), None, "messages")
    meant = GenerationFields(**shared(fields, SharedFields), stop=list(fields.stop_sequences or ()))
    limit = model.answer_limit(fields.max_tokens)
    begins = chat.messages[-1]["role"] != "assistant" and not fields.answer_so_far
    prompt = Prompt(
        encoded.ids,
        spans,
        max(1, min(limit, room)),
        None,
        marks=kept_marks(model, meant, marks, len(encoded.ids)),
        fills_context=limit > room,
        tools=tool_use(chat.messages, may_be_called=bool(chat.tools) and chat.choice.kind != "none"),
        reading=reading_of(model, chat.tools, chat.choice, chat.text, is_beginning=begins, salt=fields.cache_salt),
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
    check_message_tools(fields.tools)
    marks = _marks(fields)
    messages, tools = chat_messages(fields.system, fields.messages), chat_tools(fields.tools or ())
    choice = message_choice(fields.tool_choice, tools)
    goes_on = messages[-1]["role"] == "assistant"
    if goes_on and "tool_calls" in messages[-1]:
        raise BadRequest("messages: the tool_use blocks at the end have no tool_result blocks", param="messages")
    variables, ignored = _variables(model, fields)
    rendered = render_chat(
        model,
        [_for_template(message) for message in messages],
        tools,
        variables,
        places=_places(fields),
        salt=fields.cache_salt if isinstance(fields, MessagesFields) else None,
        may_call=choice.kind != "none",
        ending=Ending.OPEN if goes_on else Ending.TURN,
    )
    return _Chat(messages, tools, choice, rendered.text, marks, (*ignored, *rendered.ignored))


def _variables(model: ModelText, fields: CountFields) -> tuple[dict[str, Any], list[str]]:
    """Return the variables of the chat template, and which of the fields that set them have no effect."""
    wish, given = fields.thinking, fields.chat_template_kwargs or {}
    effort = None if fields.output_config is None else fields.output_config.effort
    variables, unread = own_variables(model, {"reasoning_effort": effort})
    ignored = ["output_config.effort"] * len(unread)
    if wish is None:
        return {**variables, **given}, ignored
    own = thinking_variables(model, is_on=wish.type != "disabled")
    ignored += [f"thinking.{name}" for name in ("budget_tokens", "display") if getattr(wish, name) is not None]
    if not own and (wish.type != "disabled" or model.answers.thinking is not None):
        ignored.append("thinking.type")
    return {**variables, **own, **given}, ignored


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the chat as templates read it: with reasoning apart from the content, and with a call's
    arguments as an object, which is then written as models write it."""
    out = dict(message)
    if isinstance(content := out["content"], list):
        thoughts = [part["thinking"] for part in content if part.get("type") == "thinking"]
        out["content"] = [part for part in content if part.get("type") not in THOUGHTS]
        if thoughts:
            out["reasoning_content"] = "\n".join(thoughts)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": exact_json(call["function"]["arguments"])}}
            for call in calls
        ]
    return out


def _split(fields: CountFields) -> Iterator[tuple[int, int, int]]:
    """Yield the place in the chat of each block of the messages: (message of the request, message of the chat, parts of
    the latter up to and with the block). `chat_messages` splits messages in the same way."""
    chat = 0 if fields.system is None else 1
    for i, message in enumerate(fields.messages):
        content = message["content"]
        if isinstance(content, str):
            yield i, chat, 1
            chat += 1
            continue
        parts, is_open = 0, not content
        if not content:
            yield i, chat, 0
        for block in content:
            if block["type"] == "tool_result":
                chat += is_open
                yield i, chat, _parts(block.get("content") or "")
                chat += 1
                parts, is_open = 0, False
                continue
            is_open = True
            parts += block["type"] != "tool_use"
            yield i, chat, parts
        chat += is_open


def _places(fields: CountFields) -> list[str]:
    """Return where each message of the chat is in the request."""
    places = {} if fields.system is None else {0: "system"}
    for i, chat, _ in _split(fields):
        places[chat] = f"messages[{i}].content"
    return [places[chat] for chat in sorted(places)]


def _marks(fields: CountFields) -> list[Place]:
    """Return the ends of the prefixes to keep, in ascending order. Raises BadRequest for unsupported content."""
    found: list[Place] = []
    first = 0
    if fields.system is not None:
        marks = check_content(fields.system, "system")
        gone = [is_billing(block) for block in fields.system] if isinstance(fields.system, list) else []
        found += [Place(0, j + 1 - sum(gone[: j + 1]), mark.lifetime_s) for j, mark in marks]
        first = 1
    kept = [
        parse_at(CacheControl, tool[CACHE_CONTROL], f"tools[{i}].{CACHE_CONTROL}").lifetime_s
        for i, tool in enumerate(fields.tools or ())
        if tool.get(CACHE_CONTROL) is not None
    ]
    if kept:  # templates render tools with the system text
        found.append(Place(first, 0, max(kept)))
    check_number(fields.messages, "messages")
    marked: dict[int, list[tuple[int, CacheControl]]] = {}
    for i, message in enumerate(fields.messages):
        where = f"messages[{i}]"
        parsed = parse_at(Message, message, where)
        marked[i] = check_content(parsed.content, f"{where}.content", parsed.role)
    blocks: dict[int, list[tuple[int, int]]] = {}
    for i, chat, parts in _split(fields):
        blocks.setdefault(i, []).append((chat, parts))
    found += [Place(*blocks[i][j], mark.lifetime_s) for i, marks in marked.items() for j, mark in marks]
    if fields.cache_control is not None:
        chat, parts = blocks[len(fields.messages) - 1][-1]
        last = Place(chat, parts, fields.cache_control.lifetime_s)
        found = [mark for mark in found if (mark.message, mark.parts) != (last.message, last.parts)] + [last]
    check_count(found)
    return found


def _parts(content: str | Sequence[Any]) -> int:
    return 1 if isinstance(content, str) else len(content)
