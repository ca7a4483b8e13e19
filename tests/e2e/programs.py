"""Starts the programs as a user does, and stops them by pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY = re.compile(r"listening on (http://\S+)")
ADMIN = re.compile(r"administration on (http://\S+)")


class Program:
    """One running program: its URL, its pid and its output.

    `folder`: the source tree of the program, if it is not this one.
    """

    def __init__(
        self, module: str, *flags: str, environ: dict[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="wr-log-", suffix=".txt", delete=False)  # noqa: SIM115
        self.name = module
        self._engines = len(flags[flags.index("--engines") + 1].split(",")) if "--engines" in flags else 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **({"PYTHONPATH": str(folder)} if folder else {}),
                **(environ or {}),
            },
        )
        self.url = ""

    def output(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def admin(self) -> str:
        """Return the URL of the port for operators. The program must be ready, and must have such a port."""
        found = ADMIN.search(self.output())
        assert found is not None, self.output()
        return found[1]

    def wait_ready(self, deadline_s: float = 100.0) -> str:
        give_up_at = time.monotonic() + deadline_s
        while True:
            if match := READY.search(self.output()):
                self.url = match[1]
                if self._answers():
                    return self.url
            code = self.process.poll()
            assert code is None, f"{self.name} ended with {code}:\n{self.output()}"
            assert time.monotonic() < give_up_at, f"{self.name} is not ready after {deadline_s} s:\n{self.output()}"
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Return whether all engines take requests; a gateway listens before it has probed its engines."""
        path = f"/ready?engines={self._engines}" if self.name == "router" else "/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + path, timeout=5.0) as answer:
            return bool(answer.status == 200)
        return False

    def stop(self, sig: int = signal.SIGTERM, deadline_s: float = 15.0) -> int:
        """Signal the program and wait; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
            try:
                self.process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(deadline_s)
        self._log.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._log.name)
        return self.process.returncode


@contextlib.contextmanager
def running(programs: Sequence[Program], ready_within_s: float = 100.0) -> Iterator[list[str]]:
    """Yield the URLs of the programs when all are ready; stop all at the end."""
    try:
        yield [program.wait_ready(ready_within_s) for program in programs]
    finally:
        for program in programs:
            program.stop()
