"""SIGTERM before a program has got as far as handling it, and the exit status after SIGINT.

Process 1 of a container is sent SIGTERM once, and the kernel drops it where no handler is set. Imports and the reading
of settings take a second or more, so a handler comes before them; the event loop's own takes its place.
"""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130
"""Exit status of a program that was interrupted: 128 and the number of SIGINT."""


def end_on_sigterm(status: int) -> None:
    """From now on SIGTERM ends the process at once with exit status `status`. Call it first thing in `main`.

    Nothing is cleaned up, as nothing was begun: an exception could be swallowed by whatever import it happens to hit.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
