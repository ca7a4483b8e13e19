"""Handles SIGTERM during the start of a program, and defines the exit status after SIGINT.

Process 1 of a container gets SIGTERM once, and the kernel drops it if no handler is set. Imports and the reading of
settings take a second or more, so a handler is set before them. The event loop's own handler replaces it later.
"""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130
"""Exit status of a program that was interrupted: 128 and the number of SIGINT."""


def end_on_sigterm(status: int) -> None:
    """Make SIGTERM end the process at once with exit status `status`. Call it first in `main`.

    Nothing needs cleaning up at that time. An exception could be swallowed by the import that it interrupts.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
