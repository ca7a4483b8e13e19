"""Turns a request to `/v1/responses` into the equivalent chat. Engines render that chat; prefix keys are made from it.

| in the request | in the chat |
|---|---|
| `instructions` | a first message with role `system` |
| `input`, a text | a message with role `user` |
| an item with a role | a message; its text parts (`input_text`, `output_text`) are text parts |
| a `function_call` item | a message of the assistant with one entry in `tool_calls` |
| a `function_call_output` item | a message with role `tool` |
| a `reasoning` item | a message of the assistant with the item's texts as `reasoning` |
| any other item (`item_reference`, ...) | a message whose role is its type, with the unchanged item |
| a tool with a `name` | a function with that name |

An item's metadata (`id`, `status`) and an output text's metadata (`annotations`, `logprobs`) are left out, because they
are not rendered: a client may send back an answer's items with or without them. Each item becomes a message, so a
conversation that goes on keeps the bytes of its beginning. Only the engine knows what `previous_response_id` and
`conversation` stand for. Shapes: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engine.contract.bounded_json import loads
from engine.contract.errors import ApiError, BadRequest

Json = dict[str, Any]
MAX_ID_CHARS = 256
"""Most characters of the id of a response or a conversation."""
_TEXTS = ("input_text", "output_text", "text")
_ABOUT_ITSELF = ("id", "status")


def response_messages(instructions: object, given: object) -> list[Json]:
    """Return the messages of the chat. Raises BadRequest naming the field that has the wrong type."""
    out: list[Json] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise BadRequest("instructions must be a string", param="instructions")
        out.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*out, {"role": "user", "content": given}]
    if given is None:
        given = []
    if not isinstance(given, list):
        raise BadRequest("input must be a string or a list of items", param="input")
    return [*out, *(_message(item, f"input[{i}]") for i, item in enumerate(given))]


def response_tools(tools: Sequence[Any]) -> list[Any]:
    """Return the tools of the chat. A built-in tool of the engine, which has no name, is unchanged."""
    return [_function(tool) if isinstance(tool, dict) else tool for tool in tools]


def kept_by_engine(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the reference to a conversation that the engine stores: (field name, id); None if there is none.

    Raises BadRequest for an invalid id.
    """
    previous, conversation = fields.get("previous_response_id"), fields.get("conversation")
    if previous is not None and conversation is not None:
        raise BadRequest(
            "previous_response_id and conversation exclude each other: leave one of them out",
            param="previous_response_id",
        )
    name = "conversation" if previous is None else "previous_response_id"
    value = conversation if previous is None else previous
    if isinstance(value, dict) and name == "conversation":
        value = value.get("id")
        if value is None:
            raise BadRequest("conversation.id must be a string", param="conversation.id")
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise BadRequest(f"{name} must be an id, a string of at most {MAX_ID_CHARS} characters", param=name)
    return name, value


def response_error(error: ApiError, number: int = 0) -> bytes:
    """Return the data of the event `error` that ends a stream. The official clients read its field `error`.

    `number`: the event's sequence number.
    """
    told = loads(error.body())
    said = {"code": error.code or error.type, "message": error.message, "param": error.param}
    return orjson.dumps({"type": "error", **said, "sequence_number": number, **told})


def _message(item: object, where: str) -> Json:
    if not isinstance(item, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    kind = item.get("type", "message")
    if not isinstance(kind, str) or not kind:
        raise BadRequest(f"{where}.type must be a string such as 'message'", param=f"{where}.type")
    if kind == "message":
        return _turn(item, where)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        content = _content(output, f"{where}.output") if isinstance(output, str | list) else ""
        return {"role": "tool", "content": content, "tool_call_id": item.get("call_id")}
    rest = {name: value for name, value in item.items() if name not in ("type", *_ABOUT_ITSELF) and value is not None}
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning": rest}
    if kind == "item_reference":
        rest["id"] = item.get("id")
    return {"role": kind, "content": "", "item": rest}


def _turn(item: Json, where: str) -> Json:
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role must be a string such as 'user'", param=f"{where}.role")
    rest = {
        name: value for name, value in item.items() if name not in ("type", "role", "content", "phase", *_ABOUT_ITSELF)
    }
    return {"role": role, "content": _content(item.get("content"), f"{where}.content"), **rest}


def _content(content: object, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of content parts", param=where)
    parts = []
    for j, part in enumerate(content):
        if not isinstance(part, dict):
            raise BadRequest(f"{where}[{j}] must be an object with a 'type'", param=f"{where}[{j}]")
        is_text = part.get("type") in _TEXTS and isinstance(part.get("text"), str)
        parts.append({"type": "text", "text": part["text"]} if is_text else part)
    return parts


def _function(tool: Json) -> Json:
    """Return the tool in the chat's shape. Clients write its fields in any order; here the order is fixed."""
    if tool.get("type") != "function" or "name" not in tool:
        return tool
    named = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": named}
