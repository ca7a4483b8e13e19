"""The body of `/v1/messages` and of its token count. Each field is honoured, harmless, or refused by name.

Field meanings: https://docs.anthropic.com/en/api/messages. cache_salt, min_p, repetition_penalty, seed, logit_bias,
stop_token_ids, ignore_eos, chat_template_kwargs and answer_so_far mean the same as at the other endpoints
(`fields.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.contract.errors import BadRequest
from engine.server.fields import Body, SharedFields, StopString, check_number, parse_at
from engine.server.marks import CacheControl

_UNSUPPORTED = "unsupported_parameter"

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
"""Fields of the API that this engine refuses, with the values that it accepts because they have no effect. Null is
always accepted."""

_Anything = Any


class TextBlock(BaseModel):
    """A content block. Its citations name the sources of an earlier answer and are not rendered."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUseBlock(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: _Anything = None
    """Who called: the model, for this engine has no tools of its own."""


class ToolResultBlock(BaseModel):
    """What a tool has returned. `is_error` is not rendered: the content says what went wrong."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Anything = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(BaseModel):
    """Reasoning in an earlier answer. Its signature needs no check: clients may change what they send."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(BaseModel):
    """Reasoning that another engine has encrypted. It is not rendered."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["redacted_thinking"]
    data: str


class ThinkingWish(BaseModel):
    """`thinking`: whether the model reasons. No engine can keep to `budget_tokens`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Annotated[str, Field(max_length=64)] | None = None


class Message(BaseModel):
    """A turn. `check_content` checks its content block by block, so that an error names the unsupported kind."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["user", "assistant", "system"]
    content: _Anything


class OutputConfig(BaseModel):
    """`output_config`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: _Anything = None
    """What `output_format` was named before; `engine.grammar.asked` reads both."""
    effort: Annotated[str, Field(max_length=64)] | None = None
    """The variable `reasoning_effort` of the chat template; ignored if the template does not read it."""


class CountFields(Body):
    """The fields that the token count reads. None: not given."""

    model: str | None = None
    messages: list[_Anything] = Field(min_length=1)
    system: _Anything = None
    cache_control: CacheControl | None = None
    """A mark at the end of the last block."""
    tools: list[_Anything] | None = None
    tool_choice: _Anything = None
    thinking: ThinkingWish | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_format: _Anything = None
    output_config: OutputConfig | None = None


class MessagesFields(CountFields, SharedFields):
    """The fields that generating reads."""

    max_tokens: int = Field(ge=0, le=2**31)
    """0: compute and keep the prompt, and generate no text."""
    stop_sequences: list[StopString] | None = Field(None, max_length=16)
    # Harmless: they have no effect on the answer.
    metadata: dict[str, Any] | None = None


_BLOCKS: Mapping[str, Mapping[str, type[BaseModel]]] = {
    "assistant": {
        "text": TextBlock,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedBlock,
    },
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "system": {"text": TextBlock},
}
"""The blocks that a role may have."""


def check_content(content: object, where: str, role: str = "system") -> list[tuple[int, CacheControl]]:
    """Return the marks in the content of a message or of `system`: (index of the marked block, mark).

    Raises BadRequest naming the block that is not supported.
    """
    if isinstance(content, str):
        return []
    if not isinstance(content, list):
        raise _bad(where, "must be a string or a list of text blocks")
    check_number(content, where)
    marks = []
    for j, block in enumerate(content):
        at = f"{where}[{j}]"
        if not isinstance(block, dict) or not isinstance(kind := block.get("type"), str):
            raise _bad(at, "must be an object with a 'type'")
        if (model := _BLOCKS[role].get(kind)) is None:
            is_known = any(kind in one for one in _BLOCKS.values())
            why = f"no {role} message has it" if is_known else "this engine reads text only"
            raise _bad(f"{at}.type", f"{kind[:40]!r} is not supported: {why}", _UNSUPPORTED)
        parsed = parse_at(model, block, at)
        if isinstance(parsed, ToolResultBlock):
            _check_result(parsed.content, f"{at}.content")
        if (mark := getattr(parsed, "cache_control", None)) is not None:
            marks.append((j, mark))
    return marks


def _check_result(content: object, where: str) -> None:
    """Check the content of a tool's result. Raises BadRequest naming the block that is not text."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _bad(where, "must be a string or a list of text blocks")
    check_content(content, where)


def _bad(param: str, message: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(f"{param} {message}", param=param, code=code)
