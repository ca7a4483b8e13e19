"""A checkpoint's chat template: messages and tools to the text of a prompt.

The variables, filters and functions a template may use are those that transformers gives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.contract.errors import BadRequest
from engine.text.tokenizer import TokenizerError, read_json

_RENDER_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What code over unexpected messages raises: a template indexes and concatenates whatever the client sent."""


class ChatTemplate:
    """A compiled template with the special tokens it may name. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_path(cls, folder: Path) -> ChatTemplate | None:
        """The template of the checkpoint in `folder`, None where it has none. Raises TokenizerError."""
        config = read_json(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(folder, config))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template of {folder} is not valid: line {error.lineno}: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. `variables`: a template's own switches. Raises BadRequest when the template refuses."""
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RENDER_ERRORS as error:
            raise BadRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from None


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training and changes nothing in the prompt."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's text. A file of its own comes before one inside a configuration file."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise TokenizerError(f"{folder}: chat_template must be a string or a list with one named 'default'")
    return source


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like: strings, or objects with the string in `content`."""
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    tokens = {}
    for name, value in merged.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
