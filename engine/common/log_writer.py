"""Writes log lines on a thread, so that a log that nobody reads never stops the program.

A pipe holds some 64 KiB. When its reader stands still, a write to it blocks, and so would the event loop. Here lines
wait in a bounded queue; those that find no place are dropped and counted, and the log says so when it moves again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 4 << 20
"""Some seconds of request lines at a thousand requests a second."""
FLUSH_S = 1.0
"""How long the end of the program waits for a log that nobody reads."""


class LogWriter:
    """Lines that wait to be written, and the thread that writes them. Starts with the first line."""

    def __init__(self, write: Callable[[bytes], None], max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """`write` may block; only the thread calls it. If it raises OSError, the lines are counted as dropped."""
        self.dropped = 0
        """Lines that were never written."""
        self._write = write
        self._max_bytes = max_waiting_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        """Of the lines that wait and of those that are being written."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Let a line wait, without its end. Never blocks for the log's reader."""
        data = line.encode("utf-8", "replace") + b"\n"
        with self._changed:
            if self._bytes + len(data) > self._max_bytes:
                self.dropped += 1
                return
            self._lines.append(data)
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all lines are written, `timeout_s` seconds at most."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._bytes and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _run(self) -> None:
        told = 0
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                lines = list(self._lines)
                self._lines.clear()
                dropped = self.dropped
            try:
                if dropped > told:
                    self._write(b"%d log lines were dropped: nobody read the log\n" % (dropped - told))
                    told = dropped
                self._write(b"".join(lines))
            except OSError:  # the log's reader is gone
                self.dropped += len(lines)
            with self._changed:
                self._bytes -= sum(map(len, lines))
                self._changed.notify_all()


class QueuedHandler(logging.Handler):
    """Formats records where they are logged, and lets a writer's thread write them."""

    def __init__(self, writer: LogWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            self._writer.put(self.format(record))
        except Exception:  # as the standard handlers do: a message that cannot be made must not end the program
            self.handleError(record)

    def flush(self) -> None:
        """See `logging.Handler`."""
        self._writer.flush()


def _to_stderr(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, rest) :]


STDERR = LogWriter(_to_stderr)
"""The one writer of this process, so that lines of all loggers keep their order."""
