"""What an answer must follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.grammar.parts import Part, literal


class Kind(StrEnum):
    """The language of a constraint's text."""

    JSON = "json"
    """A JSON schema."""
    REGEX = "regex"
    """A regular expression for the whole answer, in Rust's syntax, but \\d and \\w are ASCII, as in JSON schemas.
    https://docs.rs/regex/latest/regex/#syntax"""
    LARK = "lark"
    """A grammar in Lark's syntax, with llguidance's extensions, whose first rule is `start`.
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""
    GBNF = "gbnf"
    """A grammar in llama.cpp's form of EBNF, whose first rule is `root`."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must follow. Nothing is checked before it is compiled."""

    kind: Kind
    text: str
    param: str = field(default="", compare=False)
    """The request's field that asks for it; errors name it."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, param: str) -> Constraint:
        """The answer is a JSON value that the schema allows. Properties come in the schema's order."""
        return cls(Kind.JSON, json.dumps({} if schema is True else schema, separators=(",", ":")), param)

    @classmethod
    def json_object(cls, param: str) -> Constraint:
        """The answer is any JSON object."""
        return cls.json_schema({"type": "object"}, param)

    @classmethod
    def regex(cls, pattern: str, param: str) -> Constraint:
        """The whole answer matches the pattern."""
        return cls(Kind.REGEX, pattern, param)

    @classmethod
    def choice(cls, choices: Sequence[str], param: str) -> Constraint:
        """The answer is one of the texts. None of them may be empty."""
        return cls(Kind.LARK, "start: " + " | ".join(literal(text).expression for text in choices), param)

    @classmethod
    def grammar(cls, text: str, param: str) -> Constraint:
        """The answer follows a grammar. With `::=` the text is taken for EBNF (GBNF), otherwise for Lark."""
        return cls(Kind.GBNF if "::=" in text else Kind.LARK, text, param)

    @classmethod
    def of_parts(cls, part: Part, param: str) -> Constraint:
        """The answer follows a grammar composed by `engine.grammar.parts`."""
        rules = "".join(f"\n{name}{body}" for name, body in sorted(part.rules.items()))
        return cls(Kind.LARK, f"start: {part.expression}{rules}", param)
