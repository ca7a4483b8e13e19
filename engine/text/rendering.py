"""Finds the form of messages in which a chat template leaves nothing out.

Templates expect messages in different forms: some read a call's arguments as an object and some as text, some the
content as a text and some as a list of parts; many know no role `developer`. A template says nothing about a form that
it does not read: what a client sent is then missing in the prompt, without an error.

So each form is tried with messages that have a mark in the place of each text. A text whose mark is not in the rendered
prompt is left out. The marks depend only on the shape of the messages (their roles, which texts they have), so
conversations of one shape are tried once. What depends on the texts themselves, such as a template that cuts long ones,
shows only in the prompt: there, the words of each content must stand in order.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_digest

from engine.contract.errors import BadRequest
from engine.text.chat import Arguments, ChatTemplate

Json = dict[str, Any]
MOST_SHAPES = 1024
"""Shapes of messages whose form is remembered."""
_REASONING = ("reasoning_content", "reasoning")
"""Names under which templates read an assistant's reasoning. They leave out that of earlier turns on purpose."""
_THOUGHT_END = "</think>"
"""Ends the reasoning at the beginning of an assistant's content, which templates leave out on purpose, too."""
_WORD = re.compile(r"\w+")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


@dataclass(frozen=True, slots=True)
class Form:
    """How messages are given to a template."""

    developer_as_system: bool = False
    null_as_empty: bool = False
    """Whether an absent content becomes an empty one."""
    text_arguments: bool = False
    """Whether a call's arguments are JSON text, as in the API, and not the object that transformers asks for."""
    content_parts: bool = False
    """Whether a content is a list with one text part."""

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Json]:
        """Return the messages in this form. Arguments are `Arguments`."""
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> Json:
        out = dict(message)
        if self.developer_as_system and out["role"] == "developer":
            out["role"] = "system"
        if out.get("content") is None and self.null_as_empty:
            out["content"] = ""
        if self.content_parts and isinstance(out.get("content"), str):
            out["content"] = [{"type": "text", "text": out["content"]}]
        if self.text_arguments and "tool_calls" in out:
            out["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": call["function"]["arguments"].text}}
                for call in out["tool_calls"]
            ]
        return out


@dataclass(frozen=True, slots=True)
class Reading:
    """What a template makes of messages of one shape."""

    form: Form
    """The form that leaves out the least."""
    left_out: tuple[str, ...] = ()
    """The places of the texts that are left out in that form: `messages[0].content`, `tools[0].function.name`."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt's text, and the places of the texts that the template left out."""

    text: str
    left_out: tuple[str, ...]


class ChatRenderer:
    """Renders messages in the form that the template reads. Thread-safe."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, Reading] = OrderedDict()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        goes_on: bool = False,
    ) -> RenderedChat:
        """Return the prompt of checked messages, whose contents are texts or null and whose arguments are `Arguments`.

        `goes_on`: up to the end of the last message's content, so that the model continues that message.
        Raises BadRequest if rendering fails.
        """
        reading = self.reading(messages, tools, variables, add_generation_prompt=add_generation_prompt and not goes_on)
        given = reading.form.of(messages)
        if goes_on:
            text = self.template.render_open(given, tools, variables)
        else:
            text = self.template.render(given, tools, variables, add_generation_prompt=add_generation_prompt)
        return RenderedChat(text, tuple(dict.fromkeys((*reading.left_out, *_shortened(messages, text)))))

    def reads(self, variable: str) -> bool:
        """Return whether a request's own variable can have an effect on a prompt."""
        return variable in self.template.variables

    def reading(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> Reading:
        """Return the reading of messages of this shape."""
        trial = _Trial.of(messages, tools)
        read = {name: value for name, value in (variables or {}).items() if self.reads(name)}
        try:
            shape = repr((trial.messages, trial.tools, read, add_generation_prompt))
        except RecursionError:  # a client may nest values deeper than Python writes them
            return self._read(trial, variables, add_generation_prompt)
        key = xxh3_128_digest(shape.encode(errors="surrogatepass"))
        with self._lock:
            if (known := self._found.get(key)) is not None:
                self._found.move_to_end(key)
                return known
        reading = self._read(trial, variables, add_generation_prompt)
        with self._lock:
            self._found[key] = reading
            while len(self._found) > MOST_SHAPES:
                self._found.popitem(last=False)
        return reading

    def _read(self, trial: _Trial, variables: Mapping[str, Any] | None, add_generation_prompt: bool) -> Reading:
        best: tuple[int, Reading] | None = None
        for form in self._forms(trial):
            try:
                prompt = self.template.render(
                    form.of(trial.messages), trial.tools, variables, add_generation_prompt=add_generation_prompt
                )
            except BadRequest:
                continue
            left_out = trial.left_out(prompt)
            faults = 2 * len(left_out) + trial.is_distorted(prompt)
            if best is None or faults < best[0]:
                best = faults, Reading(form, left_out)
            if not faults:
                break
        # If no form renders, the messages themselves will not render either; that error says why.
        return Reading(self._first_form) if best is None else best[1]

    @property
    def _first_form(self) -> Form:
        return Form(developer_as_system=not self.template.mentions("developer"))

    def _forms(self, trial: _Trial) -> Iterator[Form]:
        """Yield the forms that differ for these messages, the usual ones first."""
        first = self._first_form
        both = (False, True)
        for parts, text_arguments, null_as_empty in itertools.product(
            both if trial.has_content else both[:1],
            both if trial.has_arguments else both[:1],
            both if trial.has_null else both[:1],
        ):
            yield Form(first.developer_as_system, null_as_empty, text_arguments, parts)


@dataclass(slots=True)
class _Trial:
    """Messages and tools with marks in the place of texts."""

    messages: list[Json] = field(default_factory=list)
    tools: list[Any] | None = None
    marks: list[tuple[str, str]] = field(default_factory=list)
    """Each mark and its place."""
    has_content: bool = False
    has_arguments: bool = False
    has_null: bool = False

    @staticmethod
    def of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> _Trial:
        trial = _Trial()
        for i, message in enumerate(messages):
            trial.messages.append(trial._message(message, f"messages[{i}]"))
        if tools:
            trial.tools = [trial._tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        return trial

    def left_out(self, prompt: str) -> tuple[str, ...]:
        """Return the places whose marks are not in the prompt, each once."""
        return tuple(dict.fromkeys(where for mark, where in self.marks if mark not in prompt))

    def is_distorted(self, prompt: str) -> bool:
        """Return whether the prompt shows a value of Python where a text is meant: None for null, an object with single
        quotes, or JSON text that is quoted once more."""
        if self.has_null and re.search(r"\bNone\b", prompt):
            return True
        return self.has_arguments and any(
            f"'{mark}'" in prompt or f'\\"{mark}' in prompt for mark, where in self.marks if where.endswith("arguments")
        )

    def _mark(self, where: str) -> str:
        mark = f"70{len(self.marks):06d}93"  # digits: no filter for texts changes them
        self.marks.append((mark, where))
        return mark

    def _message(self, message: Mapping[str, Any], where: str) -> Json:
        out: Json = {"role": message["role"]}
        if "content" in message:
            content = message["content"]
            out["content"] = self._mark(f"{where}.content") if content else content
            self.has_content |= bool(content)
        self.has_null |= message.get("content") is None
        for name, value in message.items():
            if name == "name":
                out[name] = self._mark(f"{where}.name") if value else value
            elif name in _REASONING:
                out[name] = "thought" if value else value
            elif name == "tool_call_id":
                out[name] = _of_length(value)
            elif name == "tool_calls":
                out[name] = [self._call(call, f"{where}.{name}[{i}].function") for i, call in enumerate(value)]
        return out

    def _call(self, call: Mapping[str, Any], where: str) -> Json:
        given = call["function"]["arguments"]
        name = self._mark(f"{where}.name")
        arguments = {self._mark(f"{where}.arguments"): self._mark(f"{where}.arguments")} if given else {}
        self.has_arguments |= bool(given)
        text = "{" + ", ".join(f'"{name}": "{value}"' for name, value in arguments.items()) + "}"
        function = {"name": name, "arguments": Arguments(text, arguments)}
        return {"id": _of_length(call.get("id")), "type": "function", "function": function}

    def _tool(self, tool: Any, where: str) -> Any:
        given = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(given, dict):
            return tool
        function: Json = {"name": self._mark(f"{where}.function.name")}
        for name in ("description", "parameters"):
            value = given.get(name)
            at = f"{where}.function.{name}"
            if name == "description" and value:
                function[name] = self._mark(at)
            elif isinstance(value, dict) and isinstance(value.get("properties"), dict) and value["properties"]:
                parameter = self._mark(at)
                described = {"type": "string", "description": self._mark(at)}
                function[name] = {"type": "object", "properties": {parameter: described}, "required": [parameter]}
            elif name in given:
                function[name] = {} if isinstance(value, dict) else value
        return {"type": "function", "function": function}


def _shortened(messages: Sequence[Mapping[str, Any]], prompt: str) -> Iterator[str]:
    """Yield the places of contents of which the prompt lacks words."""
    for i, message in enumerate(messages):
        content = message.get("content") or ""
        if message["role"] == "assistant":
            content = content.rpartition(_THOUGHT_END)[2]
        if content.strip() not in prompt and not _has_words(content, prompt):
            yield f"messages[{i}].content"


def _has_words(content: str, prompt: str) -> bool:
    """Return whether the prompt has the words of `content` in their order: a template may write the text as JSON, or in
    other letters."""
    prompt = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), prompt).casefold()
    end = 0
    for word in _WORD.findall(content.casefold()):
        start = prompt.find(word, end)
        if start < 0:
            return False
        end = start + len(word)
    return True


def _of_length(value: object) -> object:
    """Return an id of the same length: some templates check it."""
    return "0" * len(value) if isinstance(value, str) else value
