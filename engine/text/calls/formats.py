"""The formats of calls and of reasoning, and how a chat template shows which of them its model writes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.text.calls import deepseek, harmony, hermes, llama_json, mistral, pythonic, qwen_xml
from engine.text.calls.machine import Reader
from engine.text.calls.thinking import PAIRS, Thinking
from engine.text.calls.tools import Tools


class _Make(Protocol):
    def __call__(self, tools: Tools, *, is_beginning: bool) -> Reader: ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls."""

    make: _Make
    marks: tuple[str, ...]
    """Texts that are seen even if they are special tokens, which are no text otherwise."""
    shown_by: Callable[[str], bool]
    """Whether a chat template is one of a model that writes this format."""


FORMATS: Mapping[str, CallFormat] = {
    "openai": CallFormat(harmony.Harmony, harmony.MARKS, lambda text: "<|channel|>" in text and "<|message|>" in text),
    "deepseek": CallFormat(deepseek.DeepSeek, deepseek.MARKS, lambda text: deepseek.OPEN in text),
    "qwen3_coder": CallFormat(
        qwen_xml.QwenXml, qwen_xml.MARKS, lambda text: qwen_xml.OPEN in text and qwen_xml.FUNCTION in text
    ),
    "hermes": CallFormat(hermes.Hermes, hermes.MARKS, lambda text: hermes.OPEN in text and "<arg_key>" not in text),
    "mistral": CallFormat(mistral.Mistral, mistral.MARKS, lambda text: "[TOOL_CALLS]" in text),
    "pythonic": CallFormat(
        pythonic.Pythonic, pythonic.MARKS, lambda text: "func_name1(" in text or pythonic.OPEN in text
    ),
    "llama3_json": CallFormat(
        llama_json.LlamaJson, llama_json.MARKS, lambda text: '"parameters": ' in text and '{"name": ' in text
    ),
}
"""The formats by vLLM's names for them. The first one that a template shows is taken."""
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers to chats."""

    calls: str | None = None
    """The format of calls, one of FORMATS; None: unknown."""
    thinking: tuple[str, str] | None = None
    """The marks around its reasoning; None: it has none."""

    @staticmethod
    def of(template: str, calls: str = "auto") -> AnswerFormat:
        """Return the format that a chat template shows. `calls`: the format of calls, if it is not `auto`."""
        if calls == "auto":
            found = next((name for name, one in FORMATS.items() if one.shown_by(template)), None)
        else:
            found = calls
        thinking = None if found == "openai" else next((pair for pair in PAIRS if pair[1] in template), None)
        return AnswerFormat(found, thinking)

    def marks(self, *, with_calls: bool) -> tuple[str, ...]:
        """Return the texts that are seen in an answer even if they are special tokens."""
        thinking = self.thinking or ()
        has_calls = self.calls is not None and (with_calls or self.calls == "openai")
        return (*thinking, *(FORMATS[self.calls].marks if has_calls and self.calls else ()))

    def reader(self, tools: Tools | None, *, prompt: str, is_beginning: bool) -> Reader | None:
        """Return a reader for one answer; None if all of it is text.

        `tools`: those that the model may call, None for none. `prompt`: the rendered text before the answer.
        `is_beginning`: whether the answer's beginning is still to come.
        """
        reader: Reader | None = None
        if self.calls == "openai":
            return harmony.Harmony(tools, is_beginning=is_beginning)
        if self.calls is not None and tools is not None:
            reader = FORMATS[self.calls].make(tools, is_beginning=is_beginning)
        if self.thinking is None:
            return reader
        is_inside = is_beginning and self.begins_inside(prompt)
        return Thinking(self.thinking, reader, is_inside=is_inside, is_beginning=is_beginning)

    def begins_inside(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark at which the reasoning begins."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[0])

    def call_id(self) -> str:
        """Return the id of a new call. Mistral's templates accept only ids of nine letters and digits."""
        if self.calls == "mistral":
            return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
