"""Answers as models write them, one writer for each format of calls, and what clients must read in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.calls.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text, joined
from engine.text.calls.formats import AnswerFormat
from engine.text.calls.tools import Tools

Call = tuple[str, dict[str, Any]]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "many": {"type": "array"},
        "sure": {"type": "boolean"},
        "size": {"type": "number"},
    },
}
TOOLS = Tools({"find": SCHEMA, "get_weather": SCHEMA})


def js(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def py(value: object) -> str:
    return js(value) if isinstance(value, str) else repr(value)


def hermes(content: str, calls: Sequence[Call]) -> str:
    written = [f'<tool_call>\n{{"name": "{name}", "arguments": {js(given)}}}\n</tool_call>' for name, given in calls]
    return "\n".join([*([content] if content else []), *written])


def qwen3_coder(content: str, calls: Sequence[Call]) -> str:
    out = content
    for name, given in calls:
        values = [(key, value if isinstance(value, str) else js(value)) for key, value in given.items()]
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
        out += f"{chr(10) if out else ''}<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
    return out


def llama3_json(content: str, calls: Sequence[Call]) -> str:
    return content + "; ".join(f'{{"name": "{name}", "parameters": {js(given)}}}' for name, given in calls)


def pythonic(content: str, calls: Sequence[Call]) -> str:
    written = (f"{name}({', '.join(f'{key}={py(value)}' for key, value in given.items())})" for name, given in calls)
    return f"{content}[{', '.join(written)}]" if calls else content


def mistral(content: str, calls: Sequence[Call]) -> str:
    written = (f'{{"name": "{name}", "arguments": {js(given)}}}' for name, given in calls)
    return f"{content}[TOOL_CALLS][{', '.join(written)}]" if calls else content


def mistral_named(content: str, calls: Sequence[Call]) -> str:
    return content + "".join(f"[TOOL_CALLS]{name}[ARGS]{js(given)}" for name, given in calls)


def deepseek(content: str, calls: Sequence[Call]) -> str:
    written = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{js(given)}<｜tool▁call▁end｜>" for name, given in calls)
    return f"{content}<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>" if calls else content


def deepseek_fenced(content: str, calls: Sequence[Call]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{js(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"{content}<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>" if calls else content


def openai(content: str, calls: Sequence[Call]) -> str:
    channel = "commentary" if calls else "final"
    messages = [f"<|channel|>{channel}<|message|>{content}"] if content else []
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{js(given)}" for name, given in calls
    ]
    return "<|end|><|start|>assistant".join(messages)


@dataclass(frozen=True)
class Writer:
    """One way to write calls. `format`: the reader's name."""

    format: str
    write: Callable[[str, Sequence[Call]], str]
    mixes: bool = True
    """Whether a text may come before calls."""


WRITERS = {
    "hermes": Writer("hermes", hermes),
    "qwen3_coder": Writer("qwen3_coder", qwen3_coder),
    "llama3_json": Writer("llama3_json", llama3_json, mixes=False),
    "pythonic": Writer("pythonic", pythonic, mixes=False),
    "mistral": Writer("mistral", mistral),
    "mistral named": Writer("mistral", mistral_named),
    "deepseek": Writer("deepseek", deepseek),
    "deepseek fenced": Writer("deepseek", deepseek_fenced),
    "openai": Writer("openai", openai),
}


def read(
    name: str,
    pieces: Sequence[str],
    *,
    thinking: tuple[str, str] | None = None,
    prompt: str = "",
    tools: Tools | None = TOOLS,
    is_beginning: bool = True,
) -> list[Event]:
    """Return the events of an answer that comes in pieces, with neighbouring pieces joined."""
    reader = AnswerFormat(name, thinking).reader(tools, prompt=prompt, is_beginning=is_beginning)
    assert reader is not None
    events = [event for piece in pieces for event in reader.push(piece)]
    return list(joined(events + reader.finish()))


def said(events: Sequence[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return (reasoning, text, calls as name and arguments). Fails if the events are in no valid order."""
    reasoning, text = "", ""
    calls: list[tuple[str, str]] = []
    is_open = False
    for event in events:
        assert is_open or not isinstance(event, Arguments | CallEnd), events
        assert not is_open or isinstance(event, Arguments | CallEnd), events
        match event:
            case Text():
                text += event.text
            case Reasoning():
                reasoning += event.text
            case CallStart():
                calls.append((event.name, ""))
                is_open = True
            case Arguments():
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
            case CallEnd():
                is_open = False
    assert not is_open
    return reasoning, text, calls
