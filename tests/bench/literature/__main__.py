"""`make literature`: play the published evaluations' cases and write their tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console

from engine.common.settings import Settings, load_or_exit
from engine.common.signals import EXIT_INTERRUPTED
from tests.bench.literature.files import save, sections
from tests.bench.literature.run import study

PROG = "python -m tests.bench.literature"


class LiteratureSettings(Settings):
    """Flags, `WARMROUTE_*` environment and YAML keys of the tables of the literature."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    out: str = Field("out/literature", description="folder for literature.md, literature.json and literature.html")
    seeds: int = Field(3, ge=1, le=10, description="runs of each cell, with seeds 1, 2, ..")
    sessions: int = Field(
        1500, ge=100, le=100_000, description="sessions of a run; the first table takes twice as many"
    )


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, 1 if a file cannot be written, 2 for bad flags, 130 on Ctrl-C."""
    settings = load_or_exit(LiteratureSettings, argv, PROG)
    screen = Console(stderr=True, highlight=False)
    try:
        tables = study(range(1, settings.seeds + 1), settings.sessions, screen.print)
    except KeyboardInterrupt:
        print(f"\n{PROG}: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    for title, lines in sections(tables).items():
        print(f"\n{title}\n", *lines, sep="\n")
    try:
        written = save(tables, Path(settings.out))
    except OSError as error:
        print(f"{PROG}: --out cannot be written: {error}", file=sys.stderr)
        return 1
    print("", *written, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
