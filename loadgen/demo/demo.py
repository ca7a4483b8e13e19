"""`warmroute-loadgen demo`: the comparison on engines that the demo starts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from engine.common.settings import load_or_exit
from loadgen.commands.exit_status import EXIT_INVALID
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
        # Engines, gateway and generator share a few cores here. So a late generator is reported, but it is not a
        # failure.
        return 0 if status == EXIT_INVALID else status
