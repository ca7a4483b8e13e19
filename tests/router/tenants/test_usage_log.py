"""The usage log has every line once, whole, in its day's file, even if the disk is full for a while."""

# ruff: noqa: ASYNC240  # the files are tiny

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.common.files import UnusableFile
from router.tenants import usage_log as usage_log_module
from router.tenants.usage_log import DAY_S, UsageLog

NOON_S = 20_000 * DAY_S + DAY_S / 2  # 2024-10-04


class Clock:
    def __init__(self) -> None:
        self.now_s = NOON_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def log(tmp_path: Path, clock: Clock) -> AsyncIterator[UsageLog]:
    log = UsageLog(tmp_path, clock)
    await log.check()
    yield log
    await log.close()


def lines(folder: Path, date: str) -> list[Any]:
    (path,) = folder.glob(f"usage-{date}-*.jsonl")
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


async def test_lines_that_are_being_written_when_the_gateway_stops_are_written_once(
    tmp_path: Path, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_end, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow(descriptor: int) -> None:
        is_writing.set()
        may_end.wait(10)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    monkeypatch.setattr(usage_log_module, "FLUSH_S", 0.001)
    log.add({"n": 1})
    running = asyncio.create_task(log.run())
    assert await asyncio.to_thread(is_writing.wait, 10)
    running.cancel()
    await asyncio.wait([running])
    closing = asyncio.create_task(log.close())
    log.add({"n": 2})
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert [line["n"] for line in lines(tmp_path, "2024-10-04")] == [1, 2]


async def test_a_line_lies_in_the_file_of_its_day(tmp_path: Path, log: UsageLog, clock: Clock) -> None:
    log.add({"n": 1})
    clock.now_s += DAY_S / 2 - 0.25
    log.add({"n": 2})
    clock.now_s += 0.25
    log.add({"n": 3})
    await log.close()
    assert lines(tmp_path, "2024-10-04") == [
        {"time": "2024-10-04T12:00:00.000Z", "n": 1},
        {"time": "2024-10-04T23:59:59.750Z", "n": 2},
    ]
    assert lines(tmp_path, "2024-10-05") == [{"time": "2024-10-05T00:00:00.000Z", "n": 3}]
    assert log.pending_bytes == 0


async def test_lines_are_written_while_it_runs_and_after_a_restart_behind_the_others(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_log_module, "FLUSH_S", 0.01)
    for life in range(2):
        log = UsageLog(tmp_path, clock)
        task = asyncio.create_task(log.run())
        for number in range(3):
            log.add({"n": 3 * life + number})
            async with asyncio.timeout(60):
                while log.pending_bytes:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait((task,))
        await log.close()
    assert [line["n"] for line in lines(tmp_path, "2024-10-04")] == list(range(6))


@pytest.mark.parametrize("left", [b'{"time": "2024-10-04T12:0', bytes(200_000)], ids=["half a line", "zeros"])
async def test_what_a_killed_process_left_of_a_line_is_cut_off(tmp_path: Path, clock: Clock, left: bytes) -> None:
    """A power failure may leave zeros."""
    log = UsageLog(tmp_path, clock)
    log.add({"n": 1})
    await log.close()
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(left)
    log.add({"n": 2})
    await log.close()
    assert [line["n"] for line in lines(tmp_path, "2024-10-04")] == [1, 2]


async def test_two_processes_of_a_host_write_into_files_of_their_own(tmp_path: Path, clock: Clock) -> None:
    logs = [UsageLog(tmp_path, clock) for _ in range(2)]
    for number, log in enumerate(logs):
        log.add({"n": number})
        await log._flush()
    assert len(list(tmp_path.iterdir())) == 2
    for log in logs:
        await log.close()
    assert sorted(orjson.loads(path.read_bytes())["n"] for path in tmp_path.iterdir()) == [0, 1]


async def test_on_a_full_disk_lines_wait_up_to_a_bound_and_none_is_torn(
    tmp_path: Path, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a disk that fills up, this one accepts half of a write, then nothing."""
    log.add({"n": 0})
    await log._flush()
    write, is_full = os.write, [True]

    def half(descriptor: int, data: Any) -> int:
        if not is_full[0]:
            return write(descriptor, data)
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(usage_log_module, "MAX_PENDING_BYTES", 500)
    for number in range(1, 101):
        log.add({"n": number})
        if number % 10 == 0:
            assert not await log._flush()
            assert [line["n"] for line in lines(tmp_path, "2024-10-04")] == [0]
    assert 0 < log.pending_bytes <= 500
    assert log.lost > 0
    is_full[0] = False
    assert await log._flush()
    written = [line["n"] for line in lines(tmp_path, "2024-10-04")]
    assert written == list(range(len(written)))
    assert len(written) + log.lost == 101


async def test_lines_that_are_lost_at_the_end_are_counted_and_told(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    log = UsageLog(folder, clock)
    with pytest.raises(UnusableFile, match="is not a folder"):
        await log.check()
    log.add({"n": 1})
    await log.close()
    assert log.lost == 1
    assert "1 lines are lost" in caplog.text
