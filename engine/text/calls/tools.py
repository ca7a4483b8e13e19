"""What a reader must know of a request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of a request, in the order in which they are given."""

    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of each function -> the JSON Schema of its parameters."""

    @staticmethod
    def of(tools: Sequence[Mapping[str, Any]]) -> Tools:
        """Return the functions in checked tools of a chat."""
        found = {}
        for tool in tools:
            function = tool["function"]
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, dict) else {}
        return Tools(found)

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(self.functions)

    def takes_text(self, name: str, parameter: str) -> bool:
        """Return whether a function's parameter is a text. A parameter that is not described is one."""
        properties = self.functions.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return not isinstance(schema, dict) or _is_text(schema)


def _is_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(listed, list):
        return bool(listed) and all(kind in ("string", "null") for kind in listed) and "string" in listed
    values = schema.get("enum")
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
