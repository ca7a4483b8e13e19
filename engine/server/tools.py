"""The tools of a request: which of them the model may or must call, and how its answer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.contract.errors import BadRequest, quoted
from engine.grammar.constraint import Constraint
from engine.server.fields import check_number
from engine.server.forced_calls import forced_call
from engine.text.calls.formats import FORMATS, AnswerFormat
from engine.text.calls.machine import Reader
from engine.text.calls.made import MadeCalls
from engine.text.calls.tools import Tools

if TYPE_CHECKING:
    from engine.server.requests import ModelText

_TAIL_CHARS = 64
"""Characters of the prompt's end that may show that the answer begins within the reasoning."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools, and which one it must call."""

    kind: str = "auto"
    """`none`, `auto`, `required`, or `named`."""
    name: str = ""
    """The function that must be called, if it is named."""
    is_parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must have a call."""
        return self.kind in ("required", "named")


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to a request are read."""

    format: AnswerFormat
    tools: Tools | None
    """The tools that the model may call; None: none."""
    prompt_end: str
    """The last characters of the rendered prompt."""
    is_beginning: bool
    """Whether the answer's beginning is still to come."""
    is_parallel: bool = True
    """Whether an answer goes on after its first call."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the reader must see."""
    made: MadeCalls | None = None
    """Where calls are noted; None: nowhere."""
    salt: str = ""
    """Salt of the request."""
    forced: Constraint | None = None
    """What the answer follows if it must have a call."""

    def reader(self) -> Reader | None:
        """Return a reader for one answer; None if all of it is text."""
        return self.format.reader(self.tools, prompt=self.prompt_end, is_beginning=self.is_beginning)

    @property
    def open_reasoning(self) -> tuple[str, str] | None:
        """The marks of the reasoning within which the prompt ends; None: it ends outside."""
        return self.format.thinking if self.format.begins_inside(self.prompt_end) else None

    @property
    def has_reasoning(self) -> bool:
        """Whether an answer may have reasoning."""
        return self.format.thinking is not None or self.format.calls == "openai"


def reading_of(
    model: ModelText,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    prompt: str,
    *,
    is_beginning: bool,
    salt: str | None,
) -> Reading:
    """Return how the answers to a chat with these checked tools are read. `prompt`: the rendered text. Raises
    BadRequest if the model may call tools and the format of its calls is unknown."""
    may_call = bool(tools) and choice.kind != "none"
    answers = model.answers
    if may_call and answers.calls is None:
        raise BadRequest(
            "tools: the model's chat template shows no format of tool calls that this engine knows; start the engine "
            f"with --tool-call-parser ({', '.join(FORMATS)}), or give tool_choice 'none'",
            param="tools",
            code="unsupported_parameter",
        )
    if choice.is_forced and not is_beginning:
        raise _bad("tool_choice", "must be 'auto' or 'none' if the answer has begun", True)
    ids = (model.tokenizer.token_id(mark) for mark in answers.marks(with_calls=may_call))
    reading = Reading(
        answers,
        Tools.of(tools) if may_call else None,
        prompt[-_TAIL_CHARS:],
        is_beginning,
        choice.is_parallel,
        frozenset(one for one in ids if one is not None),
        model.made_calls,
        salt or "",
    )
    return replace(reading, forced=forced_call(model, reading, choice)) if choice.is_forced else reading


def check_tools(tools: Sequence[Any] | None) -> list[Mapping[str, Any]]:
    """Return the tools of a chat. Raises BadRequest if one is not a named function."""
    check_number(tools or (), "tools")
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _bad(where, "must be an object with type 'function'")
        function = tool.get("function")
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise _bad(f"{where}.function.name", "must be a string")
    return list(tools or ())


def check_response_tools(tools: Sequence[Any] | None) -> None:
    """Check the tools of `/v1/responses`. Raises BadRequest if one is not a named function."""
    check_number(tools or (), "tools")
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
            raise _bad(f"tools[{i}]", "must be an object with a 'type'")
        if kind != "function":
            raise _bad(
                f"tools[{i}].type", f"{quoted(kind)} is not supported: this engine has no tools of its own", True
            )
        if not _is_name(tool.get("name")):
            raise _bad(f"tools[{i}].name", "must be a string")


def check_message_tools(tools: Sequence[Any] | None) -> None:
    """Check the tools of `/v1/messages`. Raises BadRequest if one is not a named function with a schema."""
    check_number(tools or (), "tools")
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise _bad(f"tools[{i}]", "must be an object")
        if (kind := tool.get("type")) not in (None, "custom"):
            named = quoted(kind) if isinstance(kind, str) else "this type"
            raise _bad(f"tools[{i}].type", f"{named} is not supported: this engine has no tools of its own", True)
        if not _is_name(tool.get("name")):
            raise _bad(f"tools[{i}].name", "must be a string")
        if not isinstance(tool.get("input_schema"), dict):
            raise _bad(f"tools[{i}].input_schema", "must be a JSON Schema")


def chat_choice(value: object, tools: Sequence[Mapping[str, Any]], parallel: bool | None) -> ToolChoice:
    """Return `tool_choice` of a chat, or of `/v1/responses`, where the name is beside the type. Raises BadRequest."""
    is_parallel = parallel is not False
    if value is None:
        return ToolChoice("auto", is_parallel=is_parallel)
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return _checked(ToolChoice(value, is_parallel=is_parallel), tools)
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if not _is_name(name):
            raise _bad("tool_choice", "must name a function")
        return _checked(ToolChoice("named", str(name), is_parallel), tools)
    raise _bad("tool_choice", "must be 'none', 'auto', 'required', or name a function", isinstance(value, dict))


def message_choice(value: object, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return `tool_choice` of `/v1/messages`. Raises BadRequest."""
    if value is None:
        return ToolChoice()
    if not isinstance(value, dict):
        raise _bad("tool_choice", "must be an object with a 'type'")
    is_single = value.get("disable_parallel_tool_use") or False
    if not isinstance(is_single, bool):
        raise _bad("tool_choice.disable_parallel_tool_use", "must be true or false")
    kinds = {"none": "none", "auto": "auto", "any": "required", "tool": "named"}
    given = value.get("type")
    kind = kinds.get(given) if isinstance(given, str) else None
    if kind is None:
        raise _bad("tool_choice.type", f"must be one of {', '.join(kinds)}")
    name = value.get("name") if kind == "named" else ""
    if not isinstance(name, str) or (kind == "named" and not name):
        raise _bad("tool_choice.name", "must be a string")
    return _checked(ToolChoice(kind, name, not is_single), tools)


def _checked(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    if not choice.is_forced:
        return choice
    if not tools:
        raise _bad("tool_choice", "needs tools")
    if choice.kind == "named" and choice.name not in {tool["function"]["name"] for tool in tools}:
        raise _bad("tool_choice", f"names {quoted(choice.name)}, which is none of the tools")
    return choice


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _bad(param: str, message: str, is_unsupported: bool = False) -> BadRequest:
    code = "unsupported_parameter" if is_unsupported else "invalid_value"
    return BadRequest(f"{param} {message}", param=param, code=code)
