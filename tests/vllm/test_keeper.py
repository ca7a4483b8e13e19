"""No server outlives the tests, however they end. Runs without vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.vllm.servers import KEEPER

DEADLINE_S = 30.0
STUBBORN = """
import signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""
"""A server with a worker that ignores TERM, as a starting server may."""
PARENT = """
import os, subprocess, sys
keeper, pid_file, *command = sys.argv[1:]
subprocess.run([sys.executable, keeper, str(os.getpid()), pid_file, "0.3", *command])
"""


def within_deadline(text: str) -> Iterator[None]:
    """Yield turns of a loop, and fail if the loop does not end in time."""
    give_up_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at:
        yield
        time.sleep(0.02)
    pytest.fail(f"{text} after {DEADLINE_S:g} s")


@contextlib.contextmanager
def kept(folder: Path, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A parent whose keeper keeps a server, and the processes below it: the keeper, the server, its worker."""
    files = [folder / "server", folder / "worker"]
    words = [sys.executable, "-c", PARENT, str(KEEPER), str(files[0]), *command, str(files[1])]
    parent = subprocess.Popen(words)
    below: list[psutil.Process] = []
    try:
        for _ in within_deadline("no server and worker"):
            if all(file.exists() and file.read_text() for file in files):
                break
        below = psutil.Process(parent.pid).children(recursive=True)
        assert {int(file.read_text()) for file in files} < {process.pid for process in below}
        yield parent, below
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive


def test_a_killed_parent_takes_keeper_server_and_worker_with_it(tmp_path: Path) -> None:
    with kept(tmp_path, sys.executable, "-c", STUBBORN) as (parent, below):
        parent.kill()
        parent.wait(DEADLINE_S)
        assert_gone(below)


def test_a_told_keeper_ends_server_and_worker(tmp_path: Path) -> None:
    with kept(tmp_path, sys.executable, "-c", STUBBORN) as (parent, below):
        keeper = next(process for process in below if process.ppid() == parent.pid)
        os.kill(keeper.pid, signal.SIGTERM)
        assert_gone(below)


def test_a_server_that_ends_takes_its_worker_with_it(tmp_path: Path) -> None:
    with kept(tmp_path, sys.executable, "-c", STUBBORN) as (_, below):
        os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
        assert_gone(below)
