"""Turns a request to `/v1/messages` into the equivalent chat. Engines render that chat; prefix keys are made from it.

| in the request | in the chat |
|---|---|
| `system` | a first message with role `system` |
| a text block | a text part |
| a `tool_use` block of the assistant | an entry of the message's `tool_calls` |
| a `tool_result` block | a message with role `tool` |
| a tool with `input_schema` | a function with `parameters` |
| any other block | the same part, unchanged |

A billing block in `system` is left out, as in vLLM: Claude Code begins with one, whose hash differs in every request.
`cache_control` marks are left out: they say how long to keep a prefix and do not change it.
Shapes: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engine.contract.errors import BadRequest

CACHE_CONTROL = "cache_control"
Json = dict[str, Any]
_BILLING = "x-anthropic-billing-header"


def chat_messages(system: object, messages: Sequence[Any]) -> list[Json]:
    """Return the messages of the chat. Raises BadRequest naming the field that has the wrong type."""
    out: list[Json] = []
    if system is not None:
        content = _content(system, "system")
        kept = content if isinstance(content, str) else [block for block in content if not is_billing(block)]
        out.append({"role": "system", "content": kept})
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise BadRequest(f"{where}.role must be a string such as 'user'", param=f"{where}.role")
        content = _content(message.get("content"), f"{where}.content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content", CACHE_CONTROL)}
        out += [{"role": role, "content": content, **rest}] if isinstance(content, str) else _split(role, content, rest)
    return out


def chat_tools(tools: Sequence[Any]) -> list[Any]:
    """Return the tools of the chat. A tool without `input_schema` is unchanged except for its mark."""
    return [_function(tool) if isinstance(tool, dict) else tool for tool in tools]


def without_mark(part: Mapping[str, Any]) -> Json:
    """Return `part` without `cache_control`."""
    return {name: value for name, value in part.items() if name != CACHE_CONTROL}


def is_billing(block: object) -> bool:
    """Return whether this block of `system` is about billing and not rendered."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def _content(content: object, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of content blocks", param=where)
    for j, block in enumerate(content):
        if not isinstance(block, dict):
            raise BadRequest(f"{where}[{j}] must be an object with a 'type'", param=f"{where}[{j}]")
    return [without_mark(block) for block in content]


def _split(role: str, blocks: Sequence[Json], rest: Json) -> list[Json]:
    """Split a message: its parts and tool calls, and one message for each tool result, in the order of the blocks."""
    out: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            if parts or calls:
                out.append(_message(role, parts, calls, rest))
                parts, calls = [], []
            out.append(_tool_message(block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        else:
            parts.append(_text_part(block))
    if parts or calls or not out:
        out.append(_message(role, parts, calls, rest))
    return out


def _text_part(block: Json) -> Json:
    """Return the block as a part. A text block's citations are about the answer and are not rendered."""
    is_text = block.get("type") == "text" and isinstance(block.get("text"), str)
    return {"type": "text", "text": block["text"]} if is_text else block


def _message(role: str, parts: list[Json], calls: list[Json], rest: Json) -> Json:
    return {"role": role, "content": parts, **({"tool_calls": calls} if calls else {}), **rest}


def _tool_message(block: Json) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        content = [_text_part(without_mark(part)) if isinstance(part, dict) else part for part in content]
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}


def _call(block: Json) -> Json:
    try:
        arguments = orjson.dumps(block.get("input")).decode()
    except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
        raise BadRequest(f"messages: the input of a tool_use block cannot be written as JSON: {error}") from None
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _function(tool: Json) -> Json:
    if "input_schema" not in tool:
        return without_mark(tool)
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
