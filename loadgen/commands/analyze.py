"""`warmroute-loadgen analyze FILE`: what prefix caching and routing by prefix would gain for recorded prompts."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine.common.settings import ConfigError, Settings, group, load_or_exit
from loadgen.analyze.model import Analysis
from loadgen.analyze.read import Source, UnusableLog
from loadgen.analyze.run import analyze
from loadgen.analyze.spec import AnalysisSpec
from loadgen.analyze.text import show
from loadgen.commands.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from loadgen.commands.finish import check_writable
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.output.save import write_whole
from loadgen.output.screen import PLAIN_WIDTH, progress_screen, result_screen
from loadgen.output.style.units import printable

PROG = "warmroute-loadgen analyze"


@group("Log and caches")
class AnalyzeSettings(Settings):
    """What a log of prompts would gain from prefix caching, and what breaks reuse in it."""

    removed = REMOVED
    removed_in = REMOVED_IN

    file: CliPositionalArg[str] = Field(
        description="JSON lines with 'prompt', 'messages' or 'text', request bodies (at the top or in 'body', "
        "'request', ...), or 'hash_ids' (Mooncake, Bailian); .gz is read too"
    )
    config: str | None = Field(None, description="YAML file with any of these settings")
    field: str = Field(
        "",
        description="dotted path of the field with the prompt or request body, e.g. log.request; empty: automatic",
    )
    block_tokens: list[int] = Field(
        [16, 32, 64], description="block sizes of engines, tokens, comma-separated; caches are simulated with the first"
    )
    cache_tokens: list[int] = Field(
        [400_000, 100_000, 1_600_000],
        description="cache sizes of a pod to simulate, tokens, comma-separated; the recommendation is for the first"
        " (400,000: an 8-billion-parameter model with 16-bit cache on 80 GB)",
    )
    pods: int = Field(4, ge=1, le=4096, description="pods behind the router")
    seed: int = Field(1, description="decides the random routing")
    write_cost: float = Field(
        1.01, ge=1, le=100, description="cost of a token that is computed and stored; 1 is the cost without caching"
    )
    read_cost: float = Field(
        0.0, ge=0, lt=1, description="cost of a token that is found; 1 is the cost without caching"
    )
    format: Literal["text", "json"] = Field("text", description="what goes to standard output")
    out: str | None = Field(None, description="folder for analysis.json and analysis.txt; none: only standard output")

    @field_validator("block_tokens")
    @classmethod
    def _check_blocks(cls, sizes: list[int]) -> list[int]:
        if not sizes or min(sizes) < 1:
            raise ValueError("must name block sizes of at least 1 token")
        return sizes

    @field_validator("cache_tokens")
    @classmethod
    def _check_caches(cls, sizes: list[int]) -> list[int]:
        if any(size < 1 for size in sizes):
            raise ValueError("must name cache sizes of at least 1 token")
        return sizes

    def spec(self) -> AnalysisSpec:
        """Return the settings of the analysis."""
        return AnalysisSpec(
            block_tokens=tuple(self.block_tokens),
            cache_tokens=tuple(self.cache_tokens),
            pods=self.pods,
            seed=self.seed,
            write_cost=self.write_cost,
            read_cost=self.read_cost,
        )


def run(argv: Sequence[str]) -> int:
    """Run `warmroute-loadgen analyze` and return its exit status."""
    settings = load_or_exit(AnalyzeSettings, argv, PROG)
    try:
        if settings.out:
            check_writable(settings.out, "--out")
        analysis = _analyze(settings)
        return _write(analysis, settings)
    except (UnusableLog, ConfigError, OSError) as error:
        print(printable(f"{PROG}: {error}"), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"\n{PROG}: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def _analyze(settings: AnalyzeSettings) -> Analysis:
    console = progress_screen()
    columns = (TextColumn("{task.description:<32}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=1.0)
        doing = ""

        def progress(what: str, share: float) -> None:
            nonlocal doing
            if what != doing and not console.is_terminal:
                print(f"{PROG}: {what}", file=sys.stderr)
            doing = what
            bars.update(bar, description=what, completed=share)

        source = Source(Path(settings.file), settings.field)
        return analyze(source, settings.spec(), progress)


def _write(analysis: Analysis, settings: AnalyzeSettings) -> int:
    """Write files first, because the reader of standard output may leave early; return the exit status."""
    as_json = analysis.model_dump_json(indent=2)
    said, status = "", 0
    if settings.out:
        try:
            said = f"wrote {' and '.join(map(str, _write_files(analysis, as_json, Path(settings.out))))}"
        except OSError as error:
            said, status = f"--out cannot be written: {error}", EXIT_FAILED
    screen = result_screen()
    if settings.format == "json":
        screen.out(as_json, highlight=False)
    else:
        show(analysis, screen)
    if said:
        print(f"{PROG}: {said}", file=sys.stderr)
    return status


def _write_files(analysis: Analysis, as_json: str, folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with io.StringIO() as text:
        show(analysis, Console(file=text, highlight=False, width=PLAIN_WIDTH))
        return (
            write_whole(folder / "analysis.json", f"{as_json}\n".encode()),
            write_whole(folder / "analysis.txt", text.getvalue().encode()),
        )
