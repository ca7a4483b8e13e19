"""Where results and progress are printed: a console whose reader may leave."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PLAIN_WIDTH = 110
"""Columns of what is no terminal: wide enough for the tables."""


class Screen(Console):
    """Falls silent when its reader has gone: `| head`, or a `tee` that Ctrl-C ended first.

    rich ends the process there, and what was measured would be lost.
    """

    def on_broken_pipe(self) -> None:
        """Print into the void from now on, and so does whoever else prints there."""
        self.quiet = True
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, self.file.fileno())
        os.close(void)


def result_screen() -> Screen:
    """Standard output."""
    return Screen(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def progress_screen() -> Screen:
    """Standard error."""
    return Screen(stderr=True, highlight=False)
