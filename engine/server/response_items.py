"""The items of `/v1/responses`: which ones the engine reads, and the turns of the chat that they make."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.contract.errors import BadRequest
from engine.contract.requests import MAX_LISTED
from engine.server.fields import check_number

if TYPE_CHECKING:
    from engine.server.response_requests import ResponsesFields

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text")
_ABOUT_ITSELF = ("type", "id", "status")
_MESSAGE = (*_ABOUT_ITSELF, "role", "content", "phase")
_CALL = (*_ABOUT_ITSELF, "call_id", "name", "arguments")
_OUTPUT = (*_ABOUT_ITSELF, "call_id", "output")
_REASONING = (*_ABOUT_ITSELF, "summary", "content", "encrypted_content")
_Json = dict[str, Any]


def check_items(given: object) -> None:
    """Check `input`. Raises BadRequest naming the item that the engine does not read."""
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LISTED:
        raise _bad("input", f"must be a string, or a list of 1 to {MAX_LISTED} items")
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise _bad(where, "must be an object")
        match item.get("type", "message"):
            case "message":
                _check_message(item, where)
            case "function_call":
                _check_fields(item, where, _CALL, "call_id", "name", "arguments")
            case "function_call_output":
                _check_fields(item, where, _OUTPUT, "call_id")
                _check_content(item.get("output"), f"{where}.output")
            case "reasoning":
                _check_fields(item, where, _REASONING)
                _check_thoughts(item, where)
            case kind:
                raise _bad(f"{where}.type", f"{_named(kind)} is not supported by this engine", True)


def turns_of(messages: Sequence[Mapping[str, Any]], fields: ResponsesFields) -> tuple[list[_Json], list[str]]:
    """Return the messages for the template, and where each is in the request.

    `messages`: those of `response_messages`, one for each item. The items of one answer (reasoning, text, calls) become
    one message, as the model wrote them, so that the conversation goes on with the tokens of that answer.
    """
    first = [] if fields.instructions is None else ["instructions"]
    items: list[Any] = [None] * len(first) + (fields.input if isinstance(fields.input, list) else [None])
    named = ["input"] if isinstance(fields.input, str) else [f"input[{i}].content" for i in range(len(fields.input))]
    turns: list[_Json] = []
    places: list[str] = []
    for message, item, place in zip(messages, items, [*first, *named], strict=True):
        turn = dict(message)
        if item is not None and item.get("type") == "reasoning":
            turn = {"role": "assistant", "content": "", "reasoning_content": _thoughts(item)}
        if turns and _goes_on(turns[-1], turn):
            last = turns[-1]
            if "tool_calls" in turn:
                last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
            else:
                last["content"], places[-1] = turn["content"], place
            continue
        turns.append(turn)
        places.append(place)
    return turns, places


def _goes_on(last: Mapping[str, Any], turn: Mapping[str, Any]) -> bool:
    """Return whether a message is the rest of the last one: text after reasoning, or a call after any of them."""
    if last["role"] != "assistant" or turn["role"] != "assistant" or "reasoning_content" in turn:
        return False
    return "tool_calls" in turn or (not last["content"] and "tool_calls" not in last)


def _thoughts(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item; its summary, if it has no text."""
    parts = item.get("content") or item.get("summary") or ()
    return "\n".join(part["text"] for part in parts)


def _check_message(item: Mapping[str, Any], where: str) -> None:
    if item.get("role") not in _ROLES:
        raise _bad(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for name in item.keys() - set(_MESSAGE):
        raise _bad(f"{where}.{name}", "is not a field of a message", True)
    _check_content(item.get("content"), f"{where}.content")


def _check_fields(item: Mapping[str, Any], where: str, names: Sequence[str], *texts: str) -> None:
    for name in item.keys() - set(names):
        if item[name] is not None:
            raise _bad(f"{where}.{name}", "is not a field of this item", True)
    for name in texts:
        if not isinstance(item.get(name), str):
            raise _bad(f"{where}.{name}", "must be a string")


def _check_thoughts(item: Mapping[str, Any], where: str) -> None:
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise _bad(f"{where}.{name}", "must be a list of text parts")
        check_number(parts, f"{where}.{name}")
        for j, part in enumerate(parts):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise _bad(f"{where}.{name}[{j}].text", "must be a string")


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
