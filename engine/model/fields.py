"""Typed look-ups in a JSON object. An error names the field, and what no look-up has asked for can be listed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its name in errors. A null counts as absent, as in transformers."""

    content: Mapping[str, Any]
    origin: str
    _read: set[str] = field(default_factory=set, repr=False, compare=False)
    _inner: dict[str, Fields] = field(default_factory=dict, repr=False, compare=False)

    def get(self, name: str) -> Any:
        """Return the raw value, None if absent."""
        self._read.add(name)
        return self.content.get(name)

    def inner(self, name: str, content: Mapping[str, Any]) -> Fields:
        """Return the object `content` in the field `name`, for look-ups."""
        return self._inner.setdefault(name, Fields(content, f"{self.origin}: {name}"))

    def unread(self) -> dict[str, Any]:
        """Return the entries that no look-up has asked for, an entry of an inner object as `object.entry`.

        Entries that say nothing are left out: null, false, and what is empty.
        """
        out = {name: value for name, value in self.content.items() if name not in self._read and not _is_nothing(value)}
        for name, inner in self._inner.items():
            out |= {f"{name}.{entry}": value for entry, value in inner.unread().items()}
        return out

    def error(self, name: str, problem: str) -> ModelError:
        """Return a ModelError that names the field, its value and the problem."""
        given = repr(self.content[name]) if name in self.content else "absent"
        return ModelError(f"{self.origin}: {name} ({given}) {problem}")

    def integer(self, name: str, *, default: int | None = None) -> int:
        """Return an integer of at least 0; the default if absent. Raises ModelError."""
        value = self.get(name)
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

    def number(self, name: str, least: float, most: float) -> float | None:
        """Return a number from `least` to `most`; None if absent. Raises ModelError."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(name, f"must be a number from {least:g} to {most:g}")
        return float(value)

    def positive_number(self, name: str, *, default: float | None = None) -> float:
        """Return a finite number above 0; the default if absent. Raises ModelError."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, "must be a number above 0")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false; the default if absent. Raises ModelError."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """Return the token ids in a field that holds one or a list; empty if absent. Raises ModelError."""
        ids = self.get(name)
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in listed):
            raise self.error(name, "must be a token id or a list of token ids")
        return frozenset(listed)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed strings. Raises ModelError."""
        value = self.get(name)
        if value not in allowed:
            raise self.error(name, f"is not supported; supported: {', '.join(allowed)}")
        return str(value)


def read_fields(path: Path) -> Fields:
    """Return the JSON object in a file. Raises ModelError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return Fields(content, path.name)


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}
