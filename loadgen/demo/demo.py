"""`warmroute-loadgen demo`: the comparison on engines that the demo starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from engine.common.settings import load_or_exit
from loadgen.commands.exit_status import EXIT_FAILED, EXIT_INVALID
from loadgen.commands.finish import drive, report
from loadgen.demo.children import ChildDied
from loadgen.demo.run import DemoSettings, claim_folder, demo
from loadgen.load.progress import Progress
from loadgen.load.target import ServerUnusable
from loadgen.output.settings import OutputSettings
from loadgen.result.model import Result

PROG = "warmroute-loadgen demo"


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(DemoSettings, argv, PROG)
    return run_demo(lambda folder, progress: demo(settings, folder, progress), settings.out, PROG)


def run_demo(play: Callable[[Path, Progress], Coroutine[Any, Any, Result]], out: str, prog: str) -> int:
    """Play into a new folder, print and save the result; return the exit status."""
    with claim_folder(Path(out)) as folder:

        async def work(progress: Progress) -> Result:
            try:
                return await play(folder, progress)
            except ChildDied as error:
                raise ServerUnusable(str(error)) from None

        result, status = drive(work, prog)
        if result is None:
            return status
        status = report(result, OutputSettings.model_validate({"out": str(folder)}), prog)
        if not any(arm.summary.completed for arm in result.arms):
            print(f"{prog}: {_nothing_sent(result, folder)}", file=sys.stderr)
            return EXIT_FAILED
        # Engines, gateway and generator share a few cores here. So a late generator is reported, but it is not a
        # failure.
        return 0 if status == EXIT_INVALID else status


def _nothing_sent(result: Result, folder: Path) -> str:
    """Return why no request completed, and what to do."""
    failures = sorted({reason for arm in result.arms for reason in arm.summary.failures})
    if failures:
        return f"no request completed ({', '.join(failures)}); the logs of engines and gateway in {folder} say why"
    return (
        "no request was sent before the time was up: this machine is too slow or too busy for these settings. Close "
        "other programs, or give the demo more time with --max-time, or less to do with --pods 2"
    )
