"""Typed look-ups in a JSON object. An error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its name in errors. A null counts as absent, as in transformers."""

    content: Mapping[str, Any]
    origin: str

    def get(self, name: str) -> Any:
        """Return the raw value, None if absent."""
        return self.content.get(name)

    def error(self, name: str, problem: str) -> ModelError:
        """Return a ModelError that names the field, its value and the problem."""
        given = repr(self.content[name]) if name in self.content else "absent"
        return ModelError(f"{self.origin}: {name} ({given}) {problem}")

    def integer(self, name: str, *, default: int | None = None) -> int:
        """Return an integer of at least 0; the default if absent. Raises ModelError."""
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(name, "must be an integer that is not negative")
        return value

    def positive_int(self, name: str, *, default: int | None = None) -> int:
        """Return an integer of at least 1; the default if absent. Raises ModelError."""
        value = self.integer(name, default=default)
        if value == 0:
            raise self.error(name, "must be at least 1")
        return value

    def positive_number(self, name: str, *, default: float | None = None) -> float:
        """Return a finite number above 0; the default if absent. Raises ModelError."""
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, "must be a number above 0")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false; the default if absent. Raises ModelError."""
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed strings. Raises ModelError."""
        value = self.content.get(name)
        if value not in allowed:
            raise self.error(name, f"is not supported; supported: {', '.join(allowed)}")
        return str(value)
