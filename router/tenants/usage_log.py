"""What tenants have used, for billing: a line of JSON for each request that an engine began to serve, a file a day.

A thread writes the lines; they are on the disk (fdatasync) about a second after their request has ended. Lines that
cannot be written wait, up to MAX_PENDING_BYTES; further lines are lost, and counted. A file holds whole lines only: if
a write fails half-way, or a power failure interrupts it, the part that was written is cut off.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import orjson

from engine.common.files import UnusableFile

log = logging.getLogger(__name__)

FLUSH_S = 1.0
MAX_PENDING_BYTES = 16 * 2**20
"""About 50,000 requests."""
BATCH_BYTES = 2**20
DAY_S = 86_400
_TAIL_BYTES = 2**16
_MAX_WRITERS = 100


class UsageLog:
    """`usage-YYYY-MM-DD-HOST.jsonl` in a folder; days are in UTC, and a request belongs to the day on which it
    ended."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._folder = folder
        self._clock = clock
        self._pending: deque[tuple[int, bytes]] = deque()
        """The day and the line of each."""
        self.pending_bytes = 0
        self.lost = 0
        """Lines for which there was no room."""
        self._file: _DayFile | None = None
        self._flushing: asyncio.Task[bool] | None = None
        self._problem = ""
        self._second, self._moment = -1, ""

    async def check(self) -> None:
        """Raise UnusableFile if there is no such folder. A full disk is no reason not to serve."""
        if not await asyncio.to_thread(self._folder.is_dir):
            raise UnusableFile(f"--usage-log {self._folder} is not a folder: make it, or name another")

    def add(self, record: Mapping[str, object]) -> None:
        """Add one line, with the time in front. Nothing is written yet."""
        now_s = self._clock()
        second = int(now_s)
        if second != self._second:
            self._second, self._moment = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        moment = f"{self._moment}.{int(1000 * (now_s - second)):03d}Z"
        line = orjson.dumps({"time": moment, **record}, option=orjson.OPT_APPEND_NEWLINE)
        if self.pending_bytes + len(line) > MAX_PENDING_BYTES:
            self.lost += 1
            return
        self._pending.append((int(now_s // DAY_S), line))
        self.pending_bytes += len(line)

    async def run(self) -> None:
        """Write what has come, every FLUSH_S, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def close(self) -> None:
        """Write all lines, and close the file."""
        if not await self._flush():
            self.lost += len(self._pending)
            log.error("usage log: %d lines are lost: %s", len(self._pending), self._problem)
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
            self._file = None

    async def _flush(self) -> bool:
        """Write what waits, and return whether nothing is left. Lines that cannot be written stay, in order.

        Only one write runs at a time, and it goes on if its caller is cancelled: otherwise the thread's lines would be
        written twice.
        """
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._write_pending(), name="usage log")
        return await asyncio.shield(self._flushing)

    async def _write_pending(self) -> bool:
        while self._pending:
            day, lines, size = self._pending[0][0], [], 0
            for line_day, line in self._pending:
                if line_day != day or size >= BATCH_BYTES:
                    break
                lines.append(line)
                size += len(line)
            try:
                await asyncio.to_thread(self._write, day, b"".join(lines))
            except OSError as error:
                if str(error) != self._problem:
                    log.error(
                        "usage log: nothing can be written: %s; lines wait, up to %d bytes", error, MAX_PENDING_BYTES
                    )
                self._problem = str(error)
                return False
            self._problem = ""
            for _ in lines:
                self._pending.popleft()
            self.pending_bytes -= size
        return True

    def _write(self, day: int, lines: bytes) -> None:
        if self._file is not None and self._file.day != day:
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = _open(self._folder, day)
        self._file.append(lines)


class _DayFile:
    """One file, written only by this process."""

    def __init__(self, day: int, descriptor: int) -> None:
        self.day = day
        self._descriptor = descriptor
        self._size = _cut_to_lines(descriptor)

    def append(self, lines: bytes) -> None:
        """Append all lines, or none. Raises OSError."""
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(lines)

    def close(self) -> None:
        """Close the file; its content is on the disk already."""
        os.close(self._descriptor)


def _open(folder: Path, day: int) -> _DayFile:
    """Open the day's file of this host; if another process of the host has it, open another file."""
    date = datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()
    host = re.sub(r"[^-.a-zA-Z0-9]", "_", socket.gethostname()) or "host"
    for number in range(1, _MAX_WRITERS + 1):
        path = folder / f"usage-{date}-{host}{'' if number == 1 else f'-{number}'}.jsonl"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:
            log.debug("usage log: %s cannot be locked", path)  # some file systems have no locks
        try:
            return _DayFile(day, descriptor)
        except OSError:
            os.close(descriptor)
            raise
    raise OSError(errno.EBUSY, "too many processes of this host write here", str(folder))


def _cut_to_lines(descriptor: int) -> int:
    """Cut off an incomplete line at the end, and return the size."""
    start = size = os.fstat(descriptor).st_size
    kept = 0
    while start and not kept:  # a power failure may leave more than one piece without a line's end
        end, start = start, max(0, start - _TAIL_BYTES)
        if (found := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            kept = start + found + 1
    if kept < size:
        os.ftruncate(descriptor, kept)
    return kept
