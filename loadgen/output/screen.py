"""The console for results and progress; it survives a reader that closes the pipe."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PLAIN_WIDTH = 110
"""Columns if the output is not a terminal: wide enough for the tables."""


class Screen(Console):
    """Prints nothing more after its reader has gone: `| head`, or a `tee` that Ctrl-C ended first.

    rich would end the process there, and the measurement would be lost.
    """

    def on_broken_pipe(self) -> None:
        """Discard this console's output from now on, and everything else that is printed to the same file."""
        self.quiet = True
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, self.file.fileno())
        os.close(void)


def result_screen() -> Screen:
    """Return the console on standard output."""
    return Screen(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def progress_screen() -> Screen:
    """Return the console on standard error."""
    return Screen(stderr=True, highlight=False)
