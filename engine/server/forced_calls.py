"""Grammars of answers that must have a call: in the form in which the model writes calls anyway, so that the
conversation goes on with the tokens of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.contract.errors import BadRequest
from engine.grammar.constraint import Constraint
from engine.grammar.parts import (
    Part,
    any_text,
    either,
    literal,
    optional,
    schema,
    separated,
    sequence,
    text_until,
    token,
)
from engine.text.calls import deepseek, harmony, hermes, mistral, qwen_xml
from engine.text.calls.tools import Tools

if TYPE_CHECKING:
    from engine.server.requests import ModelText
    from engine.server.tools import Reading, ToolChoice

MOST_CALLS = 16
"""Most calls of an answer that must have one: a model under a grammar may never come to an end."""


def forced_call(model: ModelText, reading: Reading, choice: ToolChoice) -> Constraint:
    """Return what an answer follows that must have a call, by a checked choice. Raises BadRequest."""
    try:
        return _forced_call(model, reading, choice)
    except RecursionError:  # orjson reads deeper nesting than Python writes
        raise BadRequest("tools: a schema is nested too deeply for tool_choice", param="tools") from None


def _forced_call(model: ModelText, reading: Reading, choice: ToolChoice) -> Constraint:
    forms = _Forms(model, reading.tools or Tools())
    names = [choice.name] if choice.kind == "named" else list(forms.tools.functions)
    most = MOST_CALLS if choice.is_parallel and choice.kind == "required" else 1
    calls = _FORMS[model.answers.calls or ""](forms, names, most)
    thinking = model.answers.thinking
    has_ended = thinking is not None and reading.prompt_end.rstrip().endswith(thinking[1])
    if thinking is not None and not has_ended:
        if reading.open_reasoning is not None:
            calls = sequence(forms.until(thinking[1]), optional(literal("\n\n")), calls)
        else:
            thought = sequence(forms.mark(thinking[0]), forms.until(thinking[1]), optional(literal("\n\n")))
            calls = sequence(optional(thought), calls)
    return Constraint.of_parts(calls, "tool_choice")


class _Forms:
    """Parts of grammars for one model and one request."""

    def __init__(self, model: ModelText, tools: Tools) -> None:
        self._tokenizer = model.tokenizer
        self._template = "" if model.template is None else model.template.template.sources
        self.tools = tools

    def mark(self, text: str) -> Part:
        """A mark, which is a special token or a text."""
        found = self._tokenizer.token_id(text)
        return token(found) if found is not None and self._tokenizer.is_special(found) else literal(text)

    def until(self, mark: str) -> Part:
        """Any text up to a mark, with it."""
        found = self._tokenizer.token_id(mark)
        is_token = found is not None and self._tokenizer.is_special(found)
        return sequence(any_text(), self.mark(mark)) if is_token else text_until(mark)

    def arguments(self, name: str) -> Part:
        """The arguments of a function as JSON."""
        return schema({"type": "object", **self.tools.functions[name]})

    def mentions(self, text: str) -> bool:
        """Whether the chat template has this text."""
        return text in self._template

    def values(self, name: str) -> list[tuple[str, bool, Part]]:
        """Each parameter of a function: its name, whether it is required, and its JSON value."""
        given = self.tools.functions[name]
        properties, needed = given.get("properties"), given.get("required")
        shared = {key: given[key] for key in ("$defs", "definitions") if key in given}
        return [
            (
                key,
                isinstance(needed, list) and key in needed,
                schema({**one, **shared} if isinstance(one, dict) else True),
            )
            for key, one in (properties.items() if isinstance(properties, dict) else ())
        ]

    def text(self, name: str, key: str, end: str) -> Part | None:
        """A parameter's value as bare text, up to and with `end`; None: it takes no text."""
        if not self.tools.takes_text(name, key):
            return None
        described = self.tools.functions[name]["properties"][key]
        given = described.get("enum") if isinstance(described, dict) else None
        if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
            return sequence(either(*map(literal, given)), literal(end))
        return text_until(end)


def _json_call(forms: _Forms, name: str, key: str = "arguments") -> Part:
    return sequence(literal(f'{{"name": {json.dumps(name)}, "{key}": '), forms.arguments(name), literal("}"))


def _hermes(forms: _Forms, names: Sequence[str], most: int) -> Part:
    begun, end = sequence(forms.mark(hermes.OPEN), literal("\n")), sequence(literal("\n"), forms.mark(hermes.CLOSE))
    call = sequence(begun, either(*(_json_call(forms, name) for name in names)), end)
    return separated(call, literal("\n"), 1, most)


def _qwen_xml(forms: _Forms, names: Sequence[str], most: int) -> Part:
    def call(name: str) -> Part:
        parameters = []
        for key, is_needed, value in forms.values(name):
            text = forms.text(name, key, "\n</parameter>\n")
            value = sequence(value, literal("\n</parameter>\n")) if text is None else text
            one = sequence(literal(f"<parameter={key}>\n"), value)
            parameters.append(one if is_needed else optional(one))
        return sequence(literal(f"\n<function={name}>\n"), *parameters, literal("</function>\n"))

    whole = sequence(forms.mark(qwen_xml.OPEN), either(*map(call, names)), forms.mark(qwen_xml.CLOSE))
    return separated(whole, literal("\n"), 1, most)


def _llama_json(forms: _Forms, names: Sequence[str], most: int) -> Part:
    return separated(either(*(_json_call(forms, name, "parameters") for name in names)), literal("; "), 1, most)


def _pythonic(forms: _Forms, names: Sequence[str], most: int) -> Part:
    def call(name: str) -> Part:
        return sequence(literal(f"{name}("), _keywords(forms.values(name)), literal(")"))

    return sequence(literal("["), separated(either(*map(call, names)), literal(", "), 1, most), literal("]"))


def _keywords(values: Sequence[tuple[str, bool, Part]]) -> Part:
    """Arguments with their names: the required ones, then the others, with commas between."""
    ordered = sorted(values, key=lambda one: not one[1])
    if not ordered:
        return sequence()
    (key, is_needed, value), *others = ordered
    first = sequence(literal(f"{key}="), value)
    rest = [sequence(literal(f", {key}="), value) for key, _, value in others]
    parts = [part if needed else optional(part) for part, (_, needed, _) in zip(rest, others, strict=True)]
    return sequence(first, *parts) if is_needed else optional(sequence(first, *parts))


def _mistral(forms: _Forms, names: Sequence[str], most: int) -> Part:
    if not forms.mentions("[ARGS]"):
        calls = separated(either(*(_json_call(forms, name) for name in names)), literal(", "), 1, most)
        return sequence(forms.mark(mistral.OPEN), optional(literal(" ")), literal("["), calls, literal("]"))
    named = [sequence(literal(name), forms.mark("[ARGS]"), forms.arguments(name)) for name in names]
    return separated(sequence(forms.mark(mistral.OPEN), either(*named)), sequence(), 1, most)


def _deepseek(forms: _Forms, names: Sequence[str], most: int) -> Part:
    name_end = forms.mark(deepseek.NAME_END)
    if forms.mentions("```json"):
        made = [
            sequence(
                literal("function"), name_end, literal(f"{name}\n```json\n"), forms.arguments(name), literal("\n```")
            )
            for name in names
        ]
    else:
        made = [sequence(literal(name), name_end, forms.arguments(name)) for name in names]
    call = sequence(forms.mark(deepseek.OPEN), either(*made), forms.mark(deepseek.CLOSE))
    between = literal("\n") if forms.mentions("```json") else sequence()
    return sequence(forms.mark(deepseek.ALL), separated(call, between, 1, most), forms.mark(deepseek.ALL_END))


def _harmony(forms: _Forms, names: Sequence[str], most: int) -> Part:
    """One call: a model of this format waits for its result before it makes another."""
    thought = sequence(
        forms.mark(harmony.CHANNEL), literal("analysis"), forms.mark(harmony.MESSAGE), forms.until(harmony.END)
    )
    header = sequence(forms.mark(harmony.CHANNEL), literal("commentary to=functions."))
    made = [
        sequence(
            literal(f"{name} "),
            forms.mark(harmony.CONSTRAIN),
            literal("json"),
            forms.mark(harmony.MESSAGE),
            forms.arguments(name),
        )
        for name in names
    ]
    begun = optional(sequence(thought, forms.mark(harmony.START), literal("assistant")))
    return sequence(begun, header, either(*made))


_FORMS: Mapping[str, Callable[[_Forms, Sequence[str], int], Part]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_xml,
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "openai": _harmony,
}
