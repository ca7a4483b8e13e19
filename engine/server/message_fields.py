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
_TOOL_BLOCKS = ("tool_use", "tool_result")

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
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


def check_content(content: object, where: str) -> list[tuple[int, CacheControl]]:
    """Return the marks in the content of a message or of `system`: (blocks up to and including the marked one, mark).

    Raises BadRequest naming the block that is not text.
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
        if kind in _TOOL_BLOCKS:
            raise _bad(f"{at}.type", f"{kind!r} is not supported: this engine does not parse tool calls", _UNSUPPORTED)
        if kind != "text":
            raise _bad(f"{at}.type", f"{kind[:40]!r} is not supported: this engine reads text only", _UNSUPPORTED)
        mark = parse_at(TextBlock, block, at).cache_control
        if mark is not None:
            marks.append((j + 1, mark))
    return marks


def _bad(param: str, message: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(f"{param} {message}", param=param, code=code)
