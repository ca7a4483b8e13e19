"""The display while arms run: a table that stays in place on a terminal, otherwise a line every few seconds.

Both implement `loadgen.load.progress.Progress`. A call takes a few microseconds: rich draws twice a second in a thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadgen.measure.records import RequestRecord
from loadgen.output.screen import progress_screen
from loadgen.output.style.units import MISSING, clipped, count, duration, milliseconds, printable

LINE_EVERY_S = 5.0
REFRESH_PER_S = 2
_KINDS_TOLD, _DETAIL_CHARS = 8, 300
"""Maximum number of kinds of failure that are reported while arms run, and of characters in each message."""
_SMALLEST_S, _GROWTH, _BUCKETS = 1e-4, 1.02, 1000
"""Buckets 2 % wide from 0.1 ms to 11 hours."""


class RunningQuantile:
    """Quantiles of seconds within 1 %, in constant memory.

    The list never changes its size, so another thread may read it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0] * _BUCKETS

    def add(self, value_s: float) -> None:
        """Count a value."""
        bucket = 0 if value_s <= _SMALLEST_S else int(math.log(value_s / _SMALLEST_S) / math.log(_GROWTH)) + 1
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self.count += 1

    def quantile_s(self, q: float) -> float | None:
        """Return the value that a share `q` of values does not exceed, by nearest rank; None without values."""
        rank, seen = max(1, math.ceil(q * self.count)), 0
        if not self.count:
            return None
        for bucket, times in enumerate(self._counts):
            seen += times
            if seen >= rank:
                return _SMALLEST_S * _GROWTH ** (bucket - 0.5) if bucket else 0.0
        return None  # another thread added a value between the two reads


class ArmState:
    """The state of an arm while it runs, over all its blocks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.planned: int | None = 0
        self.sent = self.completed = self.failed = 0
        self.ttft, self.lag = RunningQuantile(), RunningQuantile()
        self._ttft_sum_s = 0.0
        self._prompt = self._cached = 0
        self._before = (0, 0, 0)
        self._started_s: float | None = None
        self._finished_blocks_s = 0.0

    @property
    def running(self) -> bool:
        """Return whether a block of the arm runs."""
        return self._started_s is not None

    def start(self, planned: int | None, now_s: float) -> None:
        """Begin a block."""
        self.planned = None if planned is None or self.planned is None else self.planned + planned
        self._before = (self.sent, self.completed, self.failed)
        self._started_s = now_s

    def end(self, now_s: float) -> None:
        """End the block."""
        self._finished_blocks_s = self.elapsed_s(now_s)
        self._started_s = None

    def add(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self.lag.add(max(0.0, record.sent_s - record.intended_s - record.queued_s))
        if record.failure is None:
            self.completed += 1
            self._prompt += record.prompt_tokens
            self._cached += record.cached_tokens
            if record.first_token_s is not None:
                ttft_s = record.first_token_s - record.intended_s
                self._ttft_sum_s += ttft_s
                self.ttft.add(ttft_s)
        else:
            self.failed += 1
        self.sent = max(self.sent, self.completed + self.failed)

    def set_totals(self, sent: int, completed: int, failed: int) -> None:
        """Set the totals of the current block."""
        self.sent, self.completed, self.failed = (
            before + now for before, now in zip(self._before, (sent, completed, failed), strict=True)
        )

    def elapsed_s(self, now_s: float) -> float:
        """Return the seconds that the arm's blocks have taken so far."""
        return self._finished_blocks_s + (now_s - self._started_s if self._started_s is not None else 0.0)

    def expected_s(self, now_s: float) -> float | None:
        """Return the seconds that the blocks begun so far will take at this pace; None if that is not known yet."""
        ended = self.completed + self.failed
        if self.planned is None or not ended:
            return None
        return self.elapsed_s(now_s) * max(self.planned, ended) / ended

    def cells(self, now_s: float) -> dict[str, str]:
        """Return the arm's row, by column."""
        ended, expected = self.completed + self.failed, self.expected_s(now_s)
        clock = duration(self.elapsed_s(now_s))
        return {
            "done": count(self.completed) + (f"/{count(self.planned)}" if self.planned else ""),
            "failed": count(self.failed),
            "TTFT mean": _ms(self._ttft_sum_s / self.ttft.count if self.ttft.count else None),
            "p99": _ms(self.ttft.quantile_s(0.99)),
            "cached": f"{self._cached / self._prompt:.0%}" if self._prompt else MISSING,
            "time": f"{clock} / ~{duration(expected)}" if expected and self.running else clock,
            "lag p99": _ms(self.lag.quantile_s(0.99)),
            "sent": count(self.sent),
            "req/s": f"{ended / self.elapsed_s(now_s):.1f}" if self.elapsed_s(now_s) > 0 else MISSING,
        }

    def line(self, now_s: float) -> str:
        """Return the row as a sentence."""
        c = self.cells(now_s)
        parts = [f"{c['done']} done"]
        if self.failed:
            parts.append(f"{c['failed']} failed")
        parts.append(f"{c['req/s']} req/s")
        if self.ttft.count:  # several processes report only how many requests ended
            parts += [f"TTFT mean {c['TTFT mean']} p99 {c['p99']}", f"cached {c['cached']}"]
        if self.lag.count:
            parts.append(f"lag p99 {c['lag p99']}")
        return ", ".join([*parts, c["time"]])


COLUMNS = ("sent", "done", "failed", "TTFT mean", "p99", "cached", "req/s", "time", "lag p99")
_MOST_WANTED = ("done", "failed", "TTFT mean", "p99", "cached", "time", "lag p99", "sent", "req/s")
"""Columns in the order in which a narrow terminal gets them."""


class _Shown:
    """State that the live table and the plain lines share."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._arms: dict[str, ArmState] = {}
        self._current: ArmState | None = None
        self._told: set[str] = set()
        """The kinds of failure that were reported."""

    def note(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def arm_started(self, name: str, planned: int | None) -> None:
        """Begin an arm, or its next block."""
        self._current = self._arms.setdefault(name, ArmState(name))
        self._current.start(planned, self._clock())

    def request_ended(self, record: RequestRecord) -> None:
        """Count a request of the current arm that ended."""
        if self._current:
            self._current.add(record)
            if record.failure is not None and record.failure not in self._told and len(self._told) < _KINDS_TOLD:
                self._told.add(record.failure)
                why = f": {clipped(' '.join(record.detail.split()), _DETAIL_CHARS)}" if record.detail else ""
                self.note(f"{self._current.name}: a request failed, {record.failure}{why}")

    def progress(self, sent: int, completed: int, failed: int) -> None:
        """Set the totals of the current block."""
        if self._current:
            self._current.set_totals(sent, completed, failed)

    def arm_ended(self) -> None:
        """End the current block."""
        if self._current:
            self._current.end(self._clock())
            self._current = None


class LiveTable(_Shown):
    """A row for each arm, redrawn in place. Use as a context manager, which restores the terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._live = Live(console=console, get_renderable=lambda: self, refresh_per_second=REFRESH_PER_S)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with as many columns as fit the terminal."""
        arms = list(self._arms.values())
        if arms:
            yield live_table(arms, self._clock(), options.max_width)


def live_table(arms: list[ArmState], now_s: float, width: int) -> Table:
    """Return a table at most `width` wide, from 40 columns on; the least important columns are left out first."""
    rows = [arm.cells(now_s) for arm in arms]
    name_width = min(max(len(arm.name) for arm in arms) + 2, max(12, width // 4))
    chosen: set[str] = set()
    used = name_width
    for column in _MOST_WANTED:
        used += 2 + max(len(column), *(len(row[column]) for row in rows))
        if used > width:
            break
        chosen.add(column)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("arm", width=name_width, no_wrap=True)
    shown = [column for column in COLUMNS if column in chosen]
    for column in shown:
        table.add_column(column, justify="right", no_wrap=True)
    for arm, row in zip(arms, rows, strict=True):
        name = Text(("> " if arm.running else "  ") + clipped(arm.name, name_width - 2))
        cells = [Text(row[c], style="red" if c == "failed" and arm.failed else "") for c in shown]
        table.add_row(name, *cells, style="" if arm.running else "dim")
    return table


class PlainLines(_Shown):
    """For logs: a line at each arm's end, and at most one line every five seconds before it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._last_line_s = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing; there is nothing to restore."""

    def arm_started(self, name: str, planned: int | None) -> None:
        """Begin an arm, or its next block."""
        super().arm_started(name, planned)
        self._last_line_s = self._clock()

    def request_ended(self, record: RequestRecord) -> None:
        """Count a request of the current arm that ended."""
        super().request_ended(record)
        self._print_if_due()

    def progress(self, sent: int, completed: int, failed: int) -> None:
        """Set the totals of the current block."""
        super().progress(sent, completed, failed)
        self._print_if_due()

    def arm_ended(self) -> None:
        """End the current block."""
        if self._current:
            self._print(" ended")
        super().arm_ended()

    def _print_if_due(self) -> None:
        if self._clock() - self._last_line_s >= LINE_EVERY_S:
            self._print("")

    def _print(self, suffix: str) -> None:
        self._last_line_s = self._clock()
        if self._current:
            self._console.print(
                Text(f"{self._current.name}{suffix}: {self._current.line(self._last_line_s)}"), soft_wrap=True
            )


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{milliseconds(seconds * 1000)} ms"


def open_progress(console: Console | None = None) -> LiveTable | PlainLines:
    """Return the progress display on standard error: the live table on a terminal, else plain lines."""
    console = console or progress_screen()
    return LiveTable(console) if console.is_terminal and not console.is_dumb_terminal else PlainLines(console)
