"""Starts a server, and ends it and its child processes on TERM or when the keeper's parent ends, even by KILL.

    python keeper.py PARENT_PID PID_FILE STOP_S COMMAND...

A server that is starting may ignore TERM, and a server whose parent was killed leaves its workers behind. So the keeper
stays beside the server. Its exit status is the server's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
LOOK_EVERY_S = 0.2


def main() -> int:
    """See the module."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent, pid_file, stop_s, *command = sys.argv[1:]
    if os.getppid() != int(parent):
        return 0
    server = subprocess.Popen(command, start_new_session=True)
    Path(pid_file).write_text(str(server.pid))
    while server.poll() is None and not told.is_set():
        told.wait(LOOK_EVERY_S)
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(float(stop_s))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # its workers are in its group
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
