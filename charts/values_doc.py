"""Read the chart's values.yaml with its comments, from which README.md and values.schema.json are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "warmroute"
_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):")
OPAQUE = ("resources", "probes")
"""Values that are described as a whole, not key by key."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart. `is_section`: it has values of its own."""

    path: tuple[str, ...]
    about: str
    default: Any
    is_section: bool


def read_values() -> Iterator[Value]:
    """Yield every value in the file's order. Raises ValueError for a leaf without a comment above it."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
            continue
        match = _KEY.match(line)
        if match and not any(key in OPAQUE for key in path[: len(match[1]) // 2]):
            default = defaults
            for key in (inner := [*path[: len(match[1]) // 2], match[2]]):
                default = default[key] if isinstance(default, dict) else None
            if isinstance(default, type(None)) and not comment:
                continue  # a key within a list
            path = inner
            is_section = isinstance(default, dict) and bool(default) and match[2] not in OPAQUE and line.endswith(":")
            if not comment and not is_section:
                raise ValueError(f"values.yaml: {'.'.join(path)} has no comment above it")
            yield Value(tuple(path), " ".join(comment), default, is_section)
        comment = []
