"""How every command with a result runs and ends: progress, readable errors, exit status."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from engine.common.settings import ConfigError
from loadgen.commands.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID
from loadgen.commands.interrupt import run_interruptible
from loadgen.load.progress import Progress, Silent
from loadgen.load.target import ServerUnusable
from loadgen.load.workers import WorkerDied
from loadgen.output.live import open_progress
from loadgen.output.save import Paths, save
from loadgen.output.screen import result_screen
from loadgen.output.settings import OutputSettings
from loadgen.output.style.units import printable
from loadgen.output.terminal import print_result
from loadgen.result.model import Result

T = TypeVar("T")


def drive(
    work: Callable[[Progress], Coroutine[Any, Any, T]], prog: str, *, is_quiet: bool = False
) -> tuple[T | None, int]:
    """Return the result of `work` and 0. After an error, print it and return None and the exit status."""
    try:
        if is_quiet:
            return run_interruptible(work(Silent())), 0
        with open_progress() as progress:
            return run_interruptible(work(progress)), 0
    except (ServerUnusable, WorkerDied, ConfigError) as error:
        print(printable(f"{prog}: {error}"), file=sys.stderr)
        return None, EXIT_FAILED
    except OSError as error:
        print(printable(f"{prog}: {not_possible(error)}"), file=sys.stderr)
        return None, EXIT_FAILED
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped; nothing was written", file=sys.stderr)
        return None, EXIT_INTERRUPTED


def not_possible(error: OSError) -> str:
    """Return in words what this machine could not do during a measurement, such as keep records on a full disk."""
    return f"this machine cannot go on measuring: {error}"


def check_writable(folder: str, flag: str) -> None:
    """Raise ConfigError if the folder cannot be made or written, so that the user learns it before the measurement."""
    wanted = Path(folder).absolute()
    try:
        existing = next(place for place in (wanted, *wanted.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be written: {error.strerror or error}") from None


def report(result: Result, output: OutputSettings | None, prog: str) -> int:
    """Write the files of `output`, then print the result (whoever reads standard output may stop early); return the
    exit status."""
    paths, unwritten = Paths(), None
    if output is not None:
        try:
            paths = save(result, output.folder, output.chosen_formats())
        except OSError as error:
            unwritten = error
    screen = result_screen()
    print_result(result, screen)
    for path in paths.all():
        screen.print(str(path), markup=False, soft_wrap=True)
    if unwritten is not None:
        print(f"{prog}: --out cannot be written: {unwritten}", file=sys.stderr)
        return EXIT_FAILED
    if result.partial:
        print(f"{prog}: stopped early; the result is of what had been measured", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0 if all(arm.summary.validity.valid for arm in result.arms) else EXIT_INVALID
