"""`warmroute-loadgen report result.json`: render an old result again, in other formats or with a newer program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from engine.common.settings import group, load_or_exit
from loadgen.commands.exit_status import EXIT_FAILED
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.output.save import FORMATS, save
from loadgen.output.screen import result_screen
from loadgen.output.settings import Formats, OutputSettings
from loadgen.output.terminal import print_result
from loadgen.result.files import ResultUnreadable, read_result


@group("Result", common=("result",))
class ReportSettings(OutputSettings):
    """Draw a result.json again."""

    removed = REMOVED
    removed_in = REMOVED_IN

    config: str | None = Field(None, description="YAML file with any of these settings")
    result: CliPositionalArg[str] = Field(description="result.json of compare, bench, replay, sweep, demo or simulate")
    out: str = Field("", description="folder for the report; empty: the folder of the result")
    formats: Formats = Field(
        ["html", "md", "csv"], description=f"formats to write, comma-separated, any of {', '.join(FORMATS)}"
    )


def run(argv: Sequence[str]) -> int:
    """Return the exit status: 0, or 1 if a file cannot be read or written; exit with 2 on bad flags."""
    settings = load_or_exit(ReportSettings, argv, "warmroute-loadgen report")
    source = Path(settings.result)
    screen = result_screen()
    try:
        result = read_result(source)
        paths = save(result, Path(settings.out) if settings.out else source.parent, settings.chosen_formats())
    except ResultUnreadable as error:
        print(f"warmroute-loadgen report: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"warmroute-loadgen report: --out cannot be written: {error}", file=sys.stderr)
        return EXIT_FAILED
    print_result(result, screen)
    for path in paths.all():
        screen.print(str(path), markup=False, soft_wrap=True)
    return 0
