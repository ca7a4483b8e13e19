"""Pieces of a grammar, and how to compose them: `Constraint.of_parts` makes a constraint of the whole.

Texts between pieces are exact: white space is allowed only where a piece allows it (a schema allows some between JSON's
own signs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from xxhash import xxh3_64_hexdigest

_NO_RULES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a grammar in Lark's syntax."""

    expression: str
    rules: Mapping[str, str] = field(default_factory=lambda: _NO_RULES)
    """Name -> body, with attributes, of the rules that the expression refers to."""


def literal(text: str) -> Part:
    """This text."""
    return Part(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f"))  # Lark refuses that sign unescaped


def token(token_id: int) -> Part:
    """This token of the vocabulary. Special tokens can be had in no other way: no text allows them."""
    return Part(f"<[{token_id}]>")


def schema(json_schema: Mapping[str, Any] | bool) -> Part:
    """A JSON value that the schema allows. A `$ref` sees this schema only."""
    return Part(f"%json {json.dumps(json_schema)}" if json_schema is not True else "%json {}")


def pattern(regex: str) -> Part:
    """A text that matches the regular expression as a whole."""
    return Part("/" + regex.replace("/", "\\/").replace("\n", "\\n") + "/")


def any_text() -> Part:
    """Any text, also none."""
    return Part("/(?s:.*)/")


def text_until(end: str) -> Part:
    """Any text up to the first `end`, with it."""
    name = f"until_{xxh3_64_hexdigest(end.encode())}"
    return Part(name, {name: f"[lazy]: /(?s:.*)/ {literal(end).expression}"})


def sequence(*parts: Part) -> Part:
    """All of these, one after the other, with nothing between."""
    return Part(" ".join(part.expression for part in parts) or '""', _rules(*parts))


def either(*parts: Part) -> Part:
    """One of these."""
    return Part("(" + " | ".join(part.expression for part in parts) + ")", _rules(*parts))


def optional(part: Part) -> Part:
    """This, or nothing."""
    return Part(f"({part.expression})?", part.rules)


def repeat(part: Part, least: int = 0, most: int | None = None) -> Part:
    """This, `least` to `most` times (None: any number), with nothing between."""
    if most == 0:
        return sequence()  # Lark has no such count
    return Part(f"({part.expression}){{{least},{'' if most is None else most}}}", part.rules)


def separated(part: Part, separator: Part, least: int = 0, most: int | None = None) -> Part:
    """This, `least` to `most` times, with the separator between."""
    if most is not None and most < max(least, 1):
        raise ValueError(f"at most {most} times is fewer than at least {max(least, 1)}")
    rest = repeat(sequence(separator, part), max(0, least - 1), None if most is None else most - 1)
    whole = sequence(part, rest)
    return whole if least else optional(whole)


def _rules(*parts: Part) -> dict[str, str]:
    return {name: body for part in parts for name, body in part.rules.items()}
