"""CSV, Markdown and terminal show the Result's numbers, at any width and with any name."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from loadgen.output.columns import COLUMNS, by_metric, measures
from loadgen.output.html import render_html
from loadgen.output.markdown import escaped, render_markdown
from loadgen.output.spreadsheet import LEADING, render_csv
from loadgen.output.style.units import (
    axis_time,
    clipped,
    duration,
    interval,
    metric_label,
    metric_value,
    milliseconds,
    number,
    percent,
)
from loadgen.output.terminal import fitting_tables, print_result
from loadgen.result.model import Arm, Interval, Result
from tests.loadgen.output import results


def printed(result: Result, width: int) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=width, highlight=False)
    print_result(result, console)
    return shown.getvalue()


@pytest.mark.parametrize("name", results.NAMES)
def test_csv_has_every_number_in_full(name: str) -> None:
    result = results.named(name)
    rows = list(csv.DictReader(io.StringIO(render_csv(result))))
    expected = [(("arm", a.name, ""), a.summary) for a in result.arms]
    expected += [(("block", a.name, str(i)), b) for a in result.arms for i, b in enumerate(a.blocks, 1)]
    expected += [(("step", p.arm, ""), p.summary) for p in result.sweep]
    assert sorted((r["kind"], r["arm"], r["block"]) for r in rows) == sorted(key for key, _ in expected)
    left = list(rows)
    for key, summary in expected:
        row = next(r for r in left if (r["kind"], r["arm"], r["block"]) == key)
        left.remove(row)
        for column, value in measures(summary).items():
            shown = row[column]
            if value is None:
                assert shown == ""
            elif isinstance(value, bool):
                assert shown == str(value).lower()
            else:
                assert float(shown) == value


def test_csv_columns_are_the_same_for_every_command() -> None:
    headers = {
        next(csv.reader(io.StringIO(render_csv(r)))).__repr__()
        for name in results.NAMES
        if name != "no_arms"
        for r in [results.named(name)]
    }
    assert len(headers) == 1
    columns = next(csv.reader(io.StringIO(render_csv(results.named("bench")))))
    assert tuple(columns[: len(LEADING)]) == LEADING
    assert {"duration_s", "ttft_mean_ms", "request_throughput_per_s", "prompt_tokens"} <= set(columns)


@pytest.mark.parametrize("model", ['=HYPERLINK("http://x")', "+1", "-1", "@SUM(1)", "\t=1"])
def test_a_spreadsheet_computes_no_name(model: str) -> None:
    (row,) = csv.DictReader(io.StringIO(render_csv(results.bench().model_copy(update={"model": model}))))
    assert row["model"] == f"'{model}"


def unescaped(cell: str) -> str:
    return html.unescape(re.sub(r"\\([\\`*_\[\]~$])", r"\1", cell.strip()))


@pytest.mark.parametrize("name", results.NAMES)
def test_markdown_tables_have_the_same_number_of_cells_and_the_results_numbers(name: str) -> None:
    result = results.named(name)
    text = render_markdown(result)
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("| ")]
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    if result.arms:
        rows = {unescaped(row[0]): row[1:] for row in (line.split("|")[1:-1] for line in tables[0][2:])}
        for arm in result.arms:
            cells = [cell.strip() for cell in rows[" ".join(arm.name.split())]]
            assert cells[0] == f"{arm.summary.completed:,}"
            assert milliseconds(arm.summary.ttft.mean_ms) in cells
            assert milliseconds(arm.summary.ttft.p99_ms) in cells
            assert percent(arm.summary.reuse.cached_token_rate) in cells
    for line in result.verdict:
        assert escaped(line) in text


@given(st.text(max_size=60))
def test_markdown_escapes_whatever_a_name_holds(name: str) -> None:
    shown = escaped(name)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[\[\]`*~|]", shown.replace("\\\\", ""))
    assert not re.search(r"[<>@]", shown)
    assert unescaped(shown) == html.unescape(unescaped(shown)) or "&" in name
    assert unescaped(shown) == " ".join(name.split())


@pytest.mark.parametrize("width", [60, 80, 110, 200])
@pytest.mark.parametrize("name", results.NAMES)
def test_nothing_is_wider_than_the_terminal_and_nothing_is_lost(name: str, width: int) -> None:
    result = results.named(name)
    text = printed(result, width)
    assert max(cell_len(line.rstrip()) for line in text.splitlines() or [""]) <= width
    flat = " ".join(text.split())
    for line in result.verdict:
        assert "".join(line.split()) in "".join(text.split())
    for arm in result.arms:
        if result.command != "bench":
            for value in (milliseconds(arm.summary.ttft.mean_ms), milliseconds(arm.summary.lag.p99_ms)):
                assert value in flat
    for c in result.contrasts:
        assert interval(c.metric, c.difference) in flat


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.text(max_size=30), st.integers(0, 10**9), st.text("abc %", max_size=22)), min_size=1, max_size=4
    ),
    st.integers(40, 150),
)
def test_tables_of_any_cells_fit_any_width(rows: list[tuple[str, int, str]], width: int) -> None:
    cells = [[name, str(value), word, "x"] for name, value, word in rows]
    shown = io.StringIO()
    console = Console(file=shown, width=width)
    for table in fitting_tables(["name of it", "a value (ms)", "a word", "x"], cells, width):
        console.print(table)
    text = shown.getvalue()
    assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= width
    for _, value, _ in rows:
        assert str(value) in text


def test_a_bench_prints_the_latencies_that_percentile_metrics_names() -> None:
    bench = results.named("bench")
    assert "E2EL" in printed(bench, 80)
    asked = bench.model_copy(update={"configuration": {"percentile_metrics": ["ttft", "itl"]}})
    text = printed(asked, 80)
    assert "Mean TTFT (ms):" in text
    assert "Mean ITL (ms):" in text
    assert "E2EL" not in text
    assert "TPOT" not in text


@pytest.mark.parametrize("render", [render_markdown, lambda result: printed(result, 110), render_html])
def test_what_makes_a_run_void_comes_before_the_verdict_and_only_once(render: Callable[..., Any]) -> None:
    void = results.named("with_failures")
    reason = void.arms[2].summary.validity.reasons[0]
    text = " ".join(html.unescape(render(void)).split())
    assert text.count(reason) == 1
    assert text.index(f"INVALID: in late {reason}") < text.index(void.verdict[0])
    said = void.model_copy(update={"verdict": (f"INVALID: in late {reason}", "It won.")})
    text = " ".join(html.unescape(render(said)).split())
    assert text.count(reason) == 1
    assert text.index(reason) < text.index("It won.")


def test_contrasts_are_shown_metric_by_metric_in_whatever_order_they_come() -> None:
    whole = results.named("comparison")
    mixed = whole.model_copy(update={"contrasts": tuple(sorted(whole.contrasts, key=lambda c: c.arm))})
    text = printed(mixed, 110)
    assert text.count("TTFT mean, lower wins") == 1
    groups = by_metric(mixed.contrasts)
    assert sum(map(len, groups.values())) == len(whole.contrasts)
    assert [len(group) for group in groups.values()] == [3] * len(groups)


def test_what_a_server_says_cannot_steer_the_terminal() -> None:
    bad = results.summary(failed=3).model_copy(update={"failure_details": {"timeout": "\x1b[31mred\x07"}})
    text = printed(results.result(arms=(Arm(name="\x1b[2Ja", url="", summary=bad),)), 80)
    assert "\x1b" not in text
    assert "red" in text


@given(st.floats(0, 1e7))
def test_short_numbers_stay_within_half_a_percent_of_the_value(value: float) -> None:
    for text, unit in ((milliseconds(value), 1), (number(value), 1)):
        assert float(text.replace(",", "")) * unit == pytest.approx(value, rel=0.005, abs=0.005)
    assert float(percent(value / 1e7).removesuffix(" %")) / 100 == pytest.approx(value / 1e7, abs=0.0005)


def test_every_column_of_the_table_reads_a_summary() -> None:
    summary = results.summary()
    for column in COLUMNS:
        assert column.value(summary) is not None
        assert column.cell(summary) not in ("", "–")


def test_words_for_numbers() -> None:
    assert metric_label("ttft_p99_ms") == "TTFT p99"
    assert metric_label("cached_token_rate") == "Cached token rate"
    assert metric_value("ttft_mean_ms", -12.0, sign=True) == "-12.0 ms"
    assert interval("ttft_mean_ms", Interval(value=-210, low=-260, high=-160)) == "-210 ms [-260, -160]"
    assert interval("cached_token_rate", Interval(value=0.4, low=0.378, high=0.422)) == "+40.0 points [+37.8, +42.2]"
    assert interval("request_throughput", Interval(value=0.5)) == "+0.50/s"
    assert [duration(s) for s in (0.4, 61, 3700)] == ["0 s", "1 min 01 s", "1 h 01 min"]
    assert [axis_time(v) for v in (0.25, 250, 1500)] == ["0.25 ms", "250 ms", "1.5 s"]


@given(st.text(max_size=50), st.integers(3, 40))
def test_clipping_keeps_both_ends(name: str, width: int) -> None:
    short = clipped(name, width)
    assert len(short) <= width
    assert len(short) == min(len(name), width)
