"""Signals as cancellation."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

PROGRAM = """
import asyncio
from loadgen.commands.interrupt import run_interruptible

async def work():
    print("begun", flush=True)
    try:
        await asyncio.to_thread(input)
    finally:
        print("cleaned up", flush=True)

try:
    run_interruptible(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def ignore_hangups() -> None:
    """Ignore SIGHUP, as nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def hear_hangups() -> None:
    """Handle SIGHUP as in a terminal, even if the tests themselves run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "prepare", "said"),
    [
        (signal.SIGINT, None, "cleaned up\ninterrupted\n"),
        (signal.SIGTERM, None, "cleaned up\ninterrupted\n"),
        (signal.SIGHUP, hear_hangups, "cleaned up\ninterrupted\n"),
        (signal.SIGHUP, ignore_hangups, "cleaned up\n"),
    ],
)
def test_work_cleans_up(number: signal.Signals, prepare: Callable[[], None] | None, said: str) -> None:
    """If the signal is ignored, the work goes on until it has read its input."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, _ = process.communicate("\n", timeout=30)
    assert out == said
