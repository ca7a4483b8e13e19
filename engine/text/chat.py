"""A checkpoint's chat template, which turns messages and tools into the text of a prompt.

A template may use the same variables, filters and functions as in transformers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.contract.errors import BadRequest
from engine.text.token_files import TokenFiles, TokenizerError, read_json, read_text

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors from a template on unexpected messages: it indexes and concatenates any value that a client sends."""

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""The mark that transformers puts after a message to be continued. Its space shows whether the template trims."""


_ARGUMENTS = f"arguments {secrets.token_hex(16)} "
"""Marks the place of arguments. No client can guess it."""


class Arguments(dict[str, Any]):
    """A call's arguments as an object."""

    def __init__(self, text: str, parsed: Mapping[str, Any], made: str | None = None) -> None:
        """`text`: their JSON text. `made`: that text as the model wrote it, if it is known and special."""
        super().__init__(parsed)
        self.text = text if made is None else made
        self.made = made


class ChatTemplate:
    """A compiled template with the special tokens that it may name. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """`with_tools`: the template for requests with tools, if it differs. Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        self._template = environment.from_string(source)
        self._with_tools = self._template if with_tools is None else environment.from_string(with_tools)
        self._special_tokens = dict(special_tokens)
        self.sources: str = source + (with_tools or "")
        """The text of the template, and of the one for tools."""
        self.variables: frozenset[str] = frozenset(
            name
            for one in (source, with_tools or "")
            for name in meta.find_undeclared_variables(environment.parse(one))
        )
        """The variables that the template reads, of those that it does not set itself."""

    @classmethod
    def from_path(cls, folder: Path) -> ChatTemplate | None:
        """Return the template of the checkpoint in `folder`, None if it has none. Raises TokenizerError."""
        files = TokenFiles.from_path(folder)
        source, with_tools = _template_sources(folder, files.config)
        if source is None:
            return None
        try:
            return cls(source, files.named, with_tools)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template of {folder} is not valid: line {error.lineno}: {error}") from None

    def mentions(self, word: str) -> bool:
        """Return whether the template's text has this word, such as the name of a role."""
        return word in self.sources

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text. `variables`: the template's own options. Raises BadRequest if rendering fails."""
        template = self._with_tools if tools else self._template
        try:
            return template.render(
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

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render up to the end of the last message's content, so that the model continues that message.

        The content is a text, or a list of one text part.

        The method is that of transformers for `continue_final_message`: a mark after the content shows its end. If the
        template trims the content, white space before the mark is left out. Raises BadRequest.
        """
        final = messages[-1]
        given = final.get("content") or ""
        content = given[0]["text"] if isinstance(given, list) else given
        marked_content = [{**given[0], "text": content + _MARK}] if isinstance(given, list) else content + _MARK
        marked = [*messages[:-1], {**final, "content": marked_content}]
        text = self.render(marked, tools, variables, add_generation_prompt=False)
        at = text.rfind(_MARK.strip())
        if at < 0 or content.strip() not in text:
            raise BadRequest(
                "continue_final_message: the model's chat template changes the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


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
    """Return plain JSON: jinja2's own filter escapes for HTML. A call's arguments are written as the model wrote them,
    if that is known, so that a conversation goes on with the tokens of its answers."""
    verbatim: dict[str, str] = {}
    if not sort_keys:
        value = _with_marks(value, verbatim)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for mark, arguments in verbatim.items():
        text = text.replace(f'"{mark}"', arguments, 1)
    return text


def _with_marks(value: Any, verbatim: dict[str, str]) -> Any:
    """Return the value with marks in the place of arguments. They are at most two levels deep: in a function, in a call
    or in a list of calls."""
    if isinstance(value, Arguments):
        if value.made is None:
            return value
        mark = f"{_ARGUMENTS}{len(verbatim)}"
        verbatim[mark] = value.made
        return mark
    if isinstance(value, dict) and ("arguments" in value or "function" in value):
        return {key: _with_marks(one, verbatim) for key, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_with_marks(one, verbatim) for one in value]
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _template_sources(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the template's text, and the text of the template for tools if there are two.

    A separate file takes precedence over a template inside a configuration file.
    """
    path, with_tools = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if path.is_file():
        return read_text(path), read_text(with_tools) if with_tools.is_file() else None
    source = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    sources = [source, None]
    if isinstance(source, list):  # several templates, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        sources = [named.get("default"), named.get("tool_use")]
    if not all(one is None or isinstance(one, str) for one in sources):
        raise TokenizerError(f"{folder}: chat_template must be a string or a list with one named 'default'")
    return sources[0], sources[1]
