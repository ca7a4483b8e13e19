"""Flags that every command with a result has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

from pydantic import AfterValidator, Field

from engine.common.settings import Settings, group
from loadgen.output.save import DEFAULT_FORMATS, FORMATS, Format


def check_formats(formats: list[str]) -> list[str]:
    """Return the formats: at least one, each known and named once. Raises ValueError."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        named = ", ".join(map(repr, unknown)) or "an empty list"
        raise ValueError(f"{named} is not a format; allowed: {', '.join(FORMATS)}")
    return list(dict.fromkeys(formats))


Formats = Annotated[list[str], AfterValidator(check_formats)]


@group("Result", common=("out", "formats"))
class OutputSettings(Settings):
    """Mixin: where the result goes and in which formats."""

    out: str = Field("out/result", description="folder for result.json, report.html, report.md, result.csv and PNGs")
    formats: Formats = Field(
        list(DEFAULT_FORMATS), description=f"formats to write, comma-separated, any of {', '.join(FORMATS)}"
    )

    @property
    def folder(self) -> Path:
        """Return `out` as a path."""
        return Path(self.out)

    def chosen_formats(self) -> tuple[Format, ...]:
        """Return `formats`."""
        return tuple(cast("Format", name) for name in self.formats)
