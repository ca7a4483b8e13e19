"""Writes a Result into a folder in the requested formats. A file appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from loadgen.output.markdown import render_markdown
from loadgen.output.spreadsheet import render_csv
from loadgen.result.files import to_json
from loadgen.result.model import Result

Format = Literal["json", "html", "md", "csv", "png"]
FORMATS: tuple[Format, ...] = get_args(Format)
DEFAULT_FORMATS: tuple[Format, ...] = ("json", "html", "md", "csv")


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of the files; None or empty if the format was not requested."""

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    csv: Path | None = None
    pngs: tuple[Path, ...] = ()

    def all(self) -> list[Path]:
        """Return every file that was written."""
        return [path for path in (self.json, self.html, self.markdown, self.csv, *self.pngs) if path]


def save(result: Result, folder: Path, formats: Collection[Format] = DEFAULT_FORMATS) -> Paths:
    """Write those of result.json, report.html, report.md, result.csv and plot-<name>.png that are in `formats`.

    Makes `folder`. Raises OSError if a file cannot be written. If the folder cannot be written, it fails before it
    draws anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return Paths(
        json=write_whole(folder / "result.json", to_json(result)) if "json" in formats else None,
        csv=write_whole(folder / "result.csv", render_csv(result).encode()) if "csv" in formats else None,
        markdown=write_whole(folder / "report.md", render_markdown(result).encode()) if "md" in formats else None,
        html=_save_html(result, folder) if "html" in formats else None,
        pngs=_save_pngs(result, folder) if "png" in formats else (),
    )


def write_whole(path: Path, content: bytes) -> Path:
    """Write to a file beside `path` and rename it: a reader finds the old or the new content. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _save_html(result: Result, folder: Path) -> Path:
    from loadgen.output.html import render_html  # matplotlib takes 0.5 s: import it only to draw

    return write_whole(folder / "report.html", render_html(result).encode())


def _save_pngs(result: Result, folder: Path) -> tuple[Path, ...]:
    from loadgen.output.plots.canvas import draw_png
    from loadgen.output.plots.catalog import plots_of

    return tuple(write_whole(folder / f"plot-{plot.slug}.png", draw_png(plot)) for plot in plots_of(result))
