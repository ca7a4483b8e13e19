"""The display while arms run."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from loadgen.load.progress import Progress
from loadgen.measure.records import RequestRecord
from loadgen.output.live import ArmState, LiveTable, PlainLines, RunningQuantile, live_table, open_progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(ttft_s: float = 0.2, failure: str | None = None, lag_s: float = 0.001, detail: str = "") -> RequestRecord:
    return RequestRecord(
        session=0,
        turn=0,
        group="g",
        intended_s=1.0,
        sent_s=1.0 + lag_s,
        finished_s=2.0,
        first_token_s=None if failure else 1.0 + ttft_s,
        prompt_tokens=1000,
        cached_tokens=600,
        output_tokens=10,
        has_usage=True,
        failure=failure,
        detail=detail,
    )


def screen(width: int = 100, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, color_system=None)


def shown(console: Console) -> str:
    """Return what the console has printed."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_running_quantile_is_within_one_percent_of_nearest_rank(values: list[float], q: float) -> None:
    quantile = RunningQuantile()
    for value in values:
        quantile.add(value)
    exact = float(np.quantile(values, q, method="inverted_cdf"))
    assert quantile.quantile_s(q) == pytest.approx(exact, rel=0.0101)


def test_running_quantile_takes_anything() -> None:
    quantile = RunningQuantile()
    assert quantile.quantile_s(0.99) is None
    for value in (0.0, 1e-9, 1e9):
        quantile.add(value)
    assert quantile.quantile_s(0.1) == 0.0
    highest = quantile.quantile_s(1.0)
    assert highest is not None
    assert highest > 1e4


def test_arm_adds_up_its_blocks() -> None:
    arm, clock = ArmState("a"), Clock()
    for _ in range(2):
        arm.start(10, clock())
        for i in range(10):
            arm.add(record(failure="timeout" if i == 0 else None))
        clock.now_s += 30
        arm.end(clock())
        clock.now_s += 500  # meanwhile the other arm runs
    cells = arm.cells(clock())
    assert cells["done"] == "18/20"
    assert cells["failed"] == "2"
    assert cells["sent"] == "20"
    assert cells["cached"] == "60%"
    assert cells["time"] == "1 min 00 s"
    assert cells["TTFT mean"] == "200 ms"
    assert cells["req/s"] == "0.3"


def test_totals_from_workers_count_on_top_of_the_blocks_before() -> None:
    arm, clock = ArmState("a"), Clock()
    arm.start(100, clock())
    arm.set_totals(100, 97, 3)
    arm.end(clock())
    arm.start(100, clock())
    arm.set_totals(40, 20, 1)
    clock.now_s += 12
    cells = arm.cells(clock())
    assert (cells["sent"], cells["done"], cells["failed"]) == ("140", "117/200", "4")
    assert arm.expected_s(clock()) == pytest.approx(12 * 200 / 121)
    assert cells["TTFT mean"] == cells["cached"] == "–"


def test_without_a_plan_nothing_is_promised() -> None:
    arm, clock = ArmState("a"), Clock()
    arm.start(None, clock())
    arm.add(record())
    clock.now_s += 5
    assert arm.expected_s(clock()) is None
    assert arm.cells(clock())["time"] == "5 s"
    assert arm.cells(clock())["done"] == "1"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_table_fits_and_keeps_the_most_wanted_columns(width: int) -> None:
    arms = [ArmState("round_robin"), ArmState("x" * 90), ArmState("[red]日本語[/red]" * 3)]
    for i, arm in enumerate(arms):
        arm.start(1_000_000, 0)
        for _ in range(5):
            arm.add(record(ttft_s=31.5))
        arm.set_totals(999_999, 999_000, i * 400_000)
    console = screen(width)
    console.print(live_table(arms, 3900.0, width))
    lines = shown(console).splitlines()
    assert max(cell_len(line.rstrip()) for line in lines) <= width
    assert len([line for line in lines if "999,000" in line]) == 3
    if width >= 60:
        assert "failed" in lines[0]
        assert "TTFT mean" in lines[0]
    if width >= 200:
        assert "lag p99" in lines[0]


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    clock, console = Clock(), screen()
    with PlainLines(console, clock) as progress:
        progress.note("[bold]starting[/bold]")
        progress.arm_started("a", 30)
        for i in range(30):
            clock.now_s += 0.5
            progress.request_ended(record(failure="timeout" if i == 3 else None))
        progress.arm_ended()
    lines = shown(console).splitlines()
    assert lines[:2] == ["[bold]starting[/bold]", "a: a request failed, timeout"]
    assert len(lines) == 2 + 3 + 1
    assert lines[2].startswith("a: 9/30 done, 1 failed, 2.0 req/s, TTFT mean 200 ms p99 ")
    assert lines[-1].startswith("a ended: 29/30 done, 1 failed")


def test_workers_totals_make_plain_lines_too() -> None:
    clock, console = Clock(), screen()
    with PlainLines(console, clock) as progress:
        progress.arm_started("a", 100)
        for i in range(20):
            clock.now_s += 1
            progress.progress(i, i, 0)
        progress.arm_ended()
    assert len(shown(console).splitlines()) == 5


@pytest.mark.parametrize("width", [60, 120])
def test_live_table_on_a_terminal_shows_arms_and_leaves_the_cursor_visible(width: int) -> None:
    console = screen(width, terminal=True)
    with LiveTable(console) as progress:
        progress.note("warming up")
        progress.arm_started("round_robin", 2)
        progress.request_ended(record())
        progress.arm_ended()
        progress.arm_started("other [b]", 2)
        progress.progress(2, 1, 1)
        progress.arm_ended()
    text = shown(console)
    assert "warming up" in text
    assert "round_robin" in text
    assert "other [b]" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is visible again


def test_the_terminal_is_left_in_order_when_the_run_breaks() -> None:
    console = screen(80, terminal=True)

    def interrupted() -> None:
        with LiveTable(console) as progress:
            progress.arm_started("a", None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = shown(console)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_a_pipe_gets_lines_and_a_terminal_the_table() -> None:
    progress: Progress = open_progress(screen())
    assert isinstance(progress, PlainLines)
    progress = open_progress(screen(terminal=True))
    assert isinstance(progress, LiveTable)


def test_calls_without_an_arm_are_not_shown_and_counted_for_none() -> None:
    clock, console = Clock(), screen()
    with PlainLines(console, clock) as progress:
        for _ in range(3):
            clock.now_s += 60
            progress.request_ended(record())
            progress.progress(7, 7, 0)
            progress.arm_ended()
        assert shown(console) == ""
        progress.arm_started("a", 3)
        clock.now_s += 1
        progress.request_ended(record())
        progress.arm_ended()
        progress.arm_ended()
    (line,) = shown(console).splitlines()
    assert line.startswith("a ended: 1/3 done")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_failure_of_each_kind_says_why(terminal: bool) -> None:
    """Somebody who sees failed requests wants to know why before the run ends."""
    console = screen(400, terminal)
    with open_progress(console) as progress:
        progress.arm_started("a", 9)
        for number in range(3):
            progress.request_ended(record(failure="http 429", detail=f"every engine\nis busy {number}"))
        progress.request_ended(record(failure="timeout"))
        progress.arm_started("b", 90)
        for number in range(90):
            progress.request_ended(record(failure=f"kind {number % 30}", detail="x" * 5000))
    text = shown(console)
    assert text.count("a request failed, http 429: every engine is busy 0") == 1
    assert "is busy 1" not in text
    assert text.count("a: a request failed, timeout") == 1
    assert text.count("b: a request failed, kind") == 6, "eight kinds are enough"
    assert "x" * 400 not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_note_with_a_servers_words_cannot_steer_the_terminal(terminal: bool) -> None:
    console = screen(400, terminal)
    with open_progress(console) as progress:
        progress.note("Model \x1b]0;owned\x07 is served")
    assert "]0;owned" in shown(console)
    assert "\x1b]" not in shown(console)
