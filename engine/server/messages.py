"""Checks the messages and tools of a chat request, and brings them into the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.contract.errors import BadRequest
from engine.sched.request import ToolUse
from engine.server.fields import check_number
from engine.text.calls.made import MadeCalls
from engine.text.chat import Arguments, ChatTemplate
from engine.text.exact_numbers import exact_json

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning")
"""Names of an assistant's reasoning: templates read one or the other."""
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", *_REASONING)
_EMPTY_ONLY = ("refusal", "audio", "function_call", "annotations", "parsed")
"""Fields that clients send back with an earlier answer: ignored if empty."""


def template_messages(messages: Sequence[Any], made: MadeCalls, salt: str = "") -> list[dict[str, Any]]:
    """Return the messages with joined text parts and parsed tool-call arguments, as `ChatRenderer` takes them.

    A null content stays null. `made`: calls that the model has made for requests with this salt. Raises BadRequest
    naming the fault.
    """
    check_number(messages, "messages")
    out = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for call in (call for message in out for call in message.get("tool_calls", ())):
        function, given = call["function"], call["function"]["arguments"]
        if (text := made.text_of(salt, function["name"], given)) is not None:
            function["arguments"] = Arguments(text, given, text)
    return out


def tool_use(messages: Sequence[Any], *, may_be_called: bool) -> ToolUse | None:
    """Return the use of tools in checked messages; None if there is none."""
    brings_result = messages[-1]["role"] == "tool"
    return ToolUse(may_be_called, brings_result) if may_be_called or brings_result else None


def unread_reasoning(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> Iterator[str]:
    """Yield the places of reasoning in checked messages, if the template has no name for reasoning."""
    if not any(template.mentions(name) for name in _REASONING):
        for i, message in enumerate(messages):
            if message.get("reasoning"):
                yield f"messages[{i}].reasoning"


def is_said_elsewhere(place: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the text at `place` of checked messages is left out of the prompt without loss: a `name` that only
    repeats the role, or, in a tool's result, the called function."""
    found = re.fullmatch(r"messages\[(\d+)\]\.name", place)
    if found is None:
        return False
    message = messages[int(found[1])]
    if message["name"] == message["role"]:
        return True
    called = (call["function"]["name"] for one in messages for call in one.get("tool_calls", ()))
    return message["role"] == "tool" and message["name"] in called


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(where, "must be an object")
    role = message.get("role")
    if role not in _ROLES:
        raise _bad(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    out: dict[str, Any] = {"role": role}
    content = _content(message, role, where)
    if content is not None or "content" in message:
        out["content"] = content
    for name, value in message.items():
        if name not in _FIELDS and not (name in _EMPTY_ONLY and not value):
            raise _bad(f"{where}.{name}", "is not supported by this engine", "unsupported_parameter")
        if value is None or name in ("role", "content") or name not in _FIELDS:
            continue
        if name == "tool_calls":
            if value:
                out[name] = _tool_calls(value, f"{where}.{name}")
        elif not isinstance(value, str):
            raise _bad(f"{where}.{name}", "must be a string")
        elif name in _REASONING:
            out |= dict.fromkeys(_REASONING, value)
        else:
            out[name] = value
    return out


def _content(message: Mapping[str, Any], role: str, where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return None
    if not isinstance(content, list):
        raise _bad(f"{where}.content", "must be a string or a list of text parts")
    check_number(content, f"{where}.content")
    texts = []
    for j, part in enumerate(content):
        part_where = f"{where}.content[{j}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _bad(part_where, "must be an object with a 'type'")
        if part["type"] != "text":
            raise _bad(f"{part_where}.type", f"{part['type'][:40]!r} is not supported: this engine reads text only")
        if not isinstance(part.get("text"), str):
            raise _bad(f"{part_where}.text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Return the calls with `Arguments`: the API sends JSON text, and most templates render an object as JSON."""
    if not isinstance(calls, list):
        raise _bad(where, "must be a list")
    check_number(calls, where)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"{where}[{i}].function.name", "must be a string")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        written = {"name": function["name"], "arguments": arguments}  # the order of templates, whatever the client's is
        rest = {name: value for name, value in function.items() if name not in written}
        out.append({**call, "function": {**written, **rest}})
    return out


def _arguments(given: object, where: str) -> Arguments:
    if isinstance(given, dict):
        try:
            return Arguments(json.dumps(given, ensure_ascii=False), given)
        except RecursionError:
            raise _bad(where, "is nested too deeply") from None
    text = given or "{}"
    if isinstance(text, str):
        try:
            given = exact_json(text)
        except (ValueError, RecursionError):
            raise _bad(where, "must be JSON text") from None
    if not isinstance(given, dict):
        raise _bad(where, "must be the JSON text of an object")
    return Arguments(str(text), given)


def _bad(param: str, message: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(f"{param} {message}", param=param, code=code)
