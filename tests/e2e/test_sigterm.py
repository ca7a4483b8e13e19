"""One SIGTERM ends each program at any time, because process 1 of a container gets no second one.

Process 1 has no default action for signals. A process that starts with SIGTERM ignored is in the same situation: a
signal before the handler is set is lost, and a later one must not be lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which Linux has")
DEADLINE_S = 60.0
FLAGS = {
    "router": ["--port", "0", "--engines", "http://127.0.0.1:1", "--redis-url", "redis://127.0.0.1:1"],
    "engine": ["--port", "0", "--device", "sim"],
    "loadgen": ["compare", "--url", "http://127.0.0.1:1"],
}
"""With these flags the programs keep running, except the load generator, which finds no server."""


@contextlib.contextmanager
def started(module: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the program with SIGTERM ignored until it sets a handler."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def wait_handler(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process catches SIGTERM."""
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return
        assert process.poll() is None, "it ended before the signal"
        assert time.monotonic() < give_up_at, "no handler was set"
        time.sleep(0.001)


@pytest.mark.parametrize("delay_s", [0.0, *(round(random.Random(7).uniform(0, 1.5), 3) + i for i in (0, 0.4))])
@pytest.mark.parametrize("module", ["router", "engine"])
def test_a_server_ends_whenever_it_is_asked_to(module: str, delay_s: float, tiny_checkpoint: Path) -> None:
    flags = [*FLAGS[module], *(["--model", str(tiny_checkpoint)] if module == "engine" else [])]
    with started(module, *flags) as process:
        wait_handler(process)
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


LOADING = """
import sys, torch
from engine.startup import app
from engine.startup.settings import EngineSettings

def load(settings):
    print("loading", flush=True)
    while True:
        torch.empty(200_000).normal_().to(torch.bfloat16)

app.load = load
sys.exit(app.run(EngineSettings(model=sys.argv[1], port=0)))
"""


def test_an_engine_ends_in_the_middle_of_loading(tiny_checkpoint: Path) -> None:
    """While an engine loads, a thread is inside torch, so the interpreter's usual end would abort the process."""
    command = [sys.executable, "-c", LOADING, str(tiny_checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


def test_the_load_generator_fails_when_it_is_stopped_before_it_began() -> None:
    with started("loadgen", *FLAGS["loadgen"]) as process:
        wait_handler(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 130, "a stopped Job has not succeeded"


@pytest.mark.parametrize("module", ["router", "engine", "loadgen"])
def test_the_handler_comes_before_the_imports_that_take_time(module: str) -> None:
    code = (
        "import sys, signal\n"
        f"from {module}.__main__ import main\n"
        "heavy = {'aiohttp', 'pydantic', 'uvloop', 'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} come first' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
