"""The subcommands: settings in, report out, exit status back."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.contract.settings import load_or_exit
from loadgen.client import ServerUnusable
from loadgen.compare import Comparison, compare
from loadgen.config import CompareSettings
from loadgen.demo.children import ChildDied
from loadgen.demo.run import DemoSettings, claim_folder, demo
from loadgen.interrupt import run_interruptible
from loadgen.progress import Progress, console
from loadgen.report import table, write_report
from loadgen.verdict import verdict

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def run_compare(argv: Sequence[str]) -> int:
    """`warmroute-loadgen compare`: the exit status."""
    settings = load_or_exit(CompareSettings, argv, "warmroute-loadgen compare")
    screen = console()

    async def work() -> tuple[Comparison, dict[str, str]]:
        with Progress(screen, len(settings.policies)) as progress:
            return await compare(settings, progress), {}

    return _finish(work(), Path(settings.out), screen)


def run_demo(argv: Sequence[str]) -> int:
    """`warmroute-loadgen demo`: the exit status."""
    settings = load_or_exit(DemoSettings, argv, "warmroute-loadgen demo")
    screen = console()
    with claim_folder(Path(settings.out)) as folder:
        return _finish(demo(settings, folder, screen), folder, screen)


def _finish(work: Coroutine[Any, Any, tuple[Comparison, dict[str, str]]], folder: Path, screen: Console) -> int:
    try:
        comparison, facts = run_interruptible(work)
        screen.print(table(comparison))
        for line in verdict(comparison):
            screen.print(line, markup=False)
        paths = write_report(comparison, folder, facts)
    except (ServerUnusable, ChildDied) as error:
        print(f"warmroute-loadgen: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("\nwarmroute-loadgen: stopped; no report was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    screen.print(f"\nreport  {paths.html}\nresult  {paths.json}", markup=False, soft_wrap=True)
    return 0
