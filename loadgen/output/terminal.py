"""The result on the terminal: tables that fit its width, verdict, cautions."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.output.columns import by_metric, caption, primary_arm, shown_columns, step_text, words_of
from loadgen.output.style import theme
from loadgen.output.style.units import clipped, count, interval, metric_label, printable, ratio
from loadgen.output.vllm_block import METRICS, our_block, vllm_block
from loadgen.result.model import Result, Summary

_GAP = 2
"""Characters between columns; one of them is the divider, which rich draws as a blank."""
_STYLES = {"better": "green", "worse": "red", "not distinguishable": "", "not judged": ""}
Cell = str | Text


def print_result(result: Result, console: Console) -> None:
    """Print the result: for one arm vLLM's block and ours, else tables; then the verdict and the cautions."""
    arm = primary_arm(result)
    if arm and result.command in ("bench", "replay") and len(result.arms) == 1:
        asked = result.configuration.get("percentile_metrics")
        metrics = asked if isinstance(asked, list) else [key for key, *_ in METRICS]
        _print_text(console, vllm_block(result, arm.summary, metrics))
        _print_text(console, our_block(arm.summary))
    else:
        _print_arms(result, console)
        _print_steps(result, console)
        _print_contrasts(result, console)
    _print_failures(result, console)
    words = words_of(result)
    for line in words.invalid:
        console.print(Text(printable(line), style="bold red"))
    if words.headline:
        console.print(Text(printable(words.headline), style="bold"))
    for line in words.rest:
        console.print(Text(printable(line)))
    for line in result.cautions:
        console.print(Text.assemble(("Caution: ", "yellow"), printable(line)))


def fitting_tables(headers: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> list[Table]:
    """Return one table, or several that repeat the first column: none is wider than `width`, and no cell is lost."""
    widths = [max([_word(header), *(_length(row[i]) for row in rows)]) for i, header in enumerate(headers)]
    longest = max(len(headers[0]), widths[0])
    name_width = max(8, min(longest, max(32, width // 3), width - _GAP - max(widths[1:], default=0)))
    pages: list[list[int]] = [[]]
    used = name_width
    for i in range(1, len(headers)):
        if pages[-1] and used + _GAP + widths[i] > width:
            pages.append([])
            used = name_width
        pages[-1].append(i)
        used += _GAP + widths[i]
    return [_table(headers, rows, page, [name_width, *widths[1:]]) for page in pages]


def _table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], page: Sequence[int], widths: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    table.add_column(Text(headers[0]), width=widths[0], overflow="fold")
    for i in page:
        table.add_column(Text(headers[i], justify="right"), justify="right", overflow="fold", width=widths[i])
    for row in rows:
        name = row[0] if isinstance(row[0], Text) else Text(row[0])
        shown = Text(clipped(name.plain, widths[0]), style=name.style)
        table.add_row(shown, *(cell if isinstance(cell := row[i], Text) else Text(cell) for i in page))
    return table


def _length(cell: Cell) -> int:
    return len(cell.plain if isinstance(cell, Text) else cell)


def _word(header: str) -> int:
    return max(len(word) for word in header.split())


def _print_arms(result: Result, console: Console) -> None:
    if not result.arms:
        return
    summaries = {arm.name: arm.summary for arm in result.arms}
    console.print(Text(caption(result), style="dim"))
    _print_summaries(summaries, "arm", result, console)


def _print_steps(result: Result, console: Console) -> None:
    for name in dict.fromkeys(point.arm for point in result.sweep):
        steps = {
            step_text(p.rate, p.concurrency) + (" *" if p.saturated else ""): p.summary
            for p in result.sweep
            if p.arm == name
        }
        console.print(Text(printable(f"{name}, * saturated"), style="bold"))
        _print_summaries(steps, "step", result, console)


def _print_summaries(summaries: dict[str, Summary], first: str, result: Result, console: Console) -> None:
    columns, slots = shown_columns(list(summaries.values())), theme.slots(result)
    rows: list[list[Cell]] = [
        [
            Text(name, style=theme.colour(slots[name]) if name in slots else ""),
            *(Text(c.cell(s), style="red" if c.header in ("failed", "unsent") and c.value(s) else "") for c in columns),
        ]
        for name, s in summaries.items()
    ]
    _print_tables(console, [first, *(column.title for column in columns)], rows)


def _print_contrasts(result: Result, console: Console) -> None:
    if not result.contrasts:
        return
    rows: list[list[Cell]] = []
    for metric, group in by_metric(result.contrasts).items():
        rows.append([Text(f"{metric_label(metric)}, {group[0].better} wins", style="bold"), *[""] * 4])
        rows += [
            [
                f"  {c.arm}",
                interval(metric, c.difference),
                ratio(c.ratio),
                count(c.pairs),
                Text(c.judgement, style=_STYLES[c.judgement]),
            ]
            for c in group
        ]
    headers = [f"against {printable(result.contrasts[0].baseline)}", "difference", "ratio", "pairs", "judgement"]
    _print_tables(console, headers, rows)


def _print_failures(result: Result, console: Console) -> None:
    for arm in result.arms:
        for kind, times in sorted(arm.summary.failures.items(), key=lambda item: -item[1]):
            example = arm.summary.failure_details.get(kind)
            line = f"{arm.name}: {times} x {kind}" + (f", such as: {example}" if example else "")
            console.print(Text(printable(line)))


def _print_tables(console: Console, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    for table in fitting_tables(headers, rows, console.width):
        console.print(table)
        console.print()


def _print_text(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
