"""A log that nobody reads costs lines, never time; a log that is read loses nothing and keeps its order."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from engine.common.log_writer import LogWriter, QueuedHandler

STUCK = """
import logging, os, sys, time
from engine.common.audit import AUDIT, configure_audit
from engine.common.log_lines import configure
from engine.common.log_writer import STDERR
configure("info", "text")
configure_audit()
began = time.monotonic()
for number in range(3000):
    logging.getLogger("a").info("%d %s", number, "x" * 2000)
    logging.getLogger(AUDIT).info("%d", number)
print(STDERR.dropped, time.monotonic() - began, flush=True)
"""


@given(st.lists(st.text(max_size=30), max_size=50))
def test_what_is_read_comes_whole_and_in_order(lines: list[str]) -> None:
    written: list[bytes] = []
    writer = LogWriter(written.append)
    for line in lines:
        writer.put(line)
    writer.flush(60)
    assert b"".join(written) == b"".join(line.encode("utf-8", "replace") + b"\n" for line in lines)
    assert writer.dropped == 0


@given(st.integers(1, 100), st.integers(1, 60))
def test_every_line_is_written_or_counted(count: int, room: int) -> None:
    moves, written = threading.Event(), []

    def write(data: bytes) -> None:
        assert moves.wait(60)
        written.append(data)

    writer = LogWriter(write, max_waiting_bytes=2 * room)
    for _ in range(count):
        writer.put("x")
    assert writer.dropped == max(0, count - room)
    dropped = writer.dropped
    moves.set()
    writer.flush(60)
    writer.put("y")
    writer.flush(60)
    text = b"".join(written)
    assert text.count(b"x\n") == count - dropped
    said = sum(map(int, re.findall(rb"(\d+) log lines were dropped", text)))
    assert said == dropped, "the log says so, at once or in parts"
    assert text.endswith(b"y\n")


def test_a_reader_that_is_gone_ends_nothing() -> None:
    def write(data: bytes) -> None:
        raise BrokenPipeError

    writer = LogWriter(write)
    handler = QueuedHandler(writer, logging.Formatter())
    handler.handle(logging.LogRecord("a", logging.INFO, __file__, 1, "said", (), None))
    writer.flush(60)
    assert writer.dropped == 1


def test_a_program_whose_log_nobody_reads_goes_on_and_ends() -> None:
    reading, writing = os.pipe()
    try:
        began_s = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=writing, timeout=110, check=False
        )
        dropped, seconds = map(float, run.stdout.split())
        assert run.returncode == 0
        assert dropped > 100
        assert seconds < time.monotonic() - began_s
    finally:
        os.close(reading)
        os.close(writing)
