"""What the user sees while arms run: a live bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from loadgen.client import RequestRecord
from loadgen.metrics import ttft_s

PLAIN_WIDTH = 110
LINE_EVERY_S = 5.0


def console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class Progress:
    """Shows arms as they run. Use as a context manager, so that the terminal is left in order."""

    def __init__(self, console: Console, arms: int) -> None:
        self._console = console
        self._arms = arms
        self._arm = 0
        self._bars = RichProgress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, markup=False)

    def arm_started(self, name: str, planned: int) -> None:
        """The next arm begins; it will send `planned` requests."""
        self._arm += 1
        self._name, self._planned = name, planned
        self._started_s = self._last_line_s = time.monotonic()
        self._done = self._failed = self._prompt = self._cached = 0
        self._ttft_sum_s = 0.0
        self._bar: TaskID = self._bars.add_task(name, total=planned, state="")

    def request_ended(self, record: RequestRecord) -> None:
        """A request of the current arm ended, well or badly."""
        if record.failure is None:
            self._done += 1
            self._ttft_sum_s += ttft_s(record)
            self._prompt += record.prompt_tokens
            self._cached += record.cached_tokens
        else:
            self._failed += 1
        self._bars.update(self._bar, completed=self._done + self._failed, state=self._state())
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            self._print_line("")

    def arm_ended(self) -> None:
        """The current arm is over."""
        self._bars.update(self._bar, state=self._state())
        if not self._console.is_terminal:
            self._print_line(" done")

    def _state(self) -> str:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        ttft = f"{self._ttft_sum_s / self._done * 1000:.0f} ms" if self._done else "-"
        cached = f"{self._cached / self._prompt:.0%}" if self._prompt else "-"
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._done / elapsed_s:.1f} req/s, mean TTFT {ttft}, cached {cached}{failed}"

    def _print_line(self, suffix: str) -> None:
        head = f"  arm {self._arm}/{self._arms} {self._name}: {self._done + self._failed}/{self._planned} requests"
        self._console.print(f"{head}, {self._state()}{suffix}", markup=False)
