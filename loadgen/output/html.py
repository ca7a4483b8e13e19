"""One HTML document without scripts and without outside references; for light and dark, large and small screens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from loadgen.output.columns import by_metric, caption, shown_columns, step_text, words_of
from loadgen.output.plots.canvas import Key, Plot, draw_svg
from loadgen.output.plots.catalog import plots_of
from loadgen.output.style import theme
from loadgen.output.style.units import count, interval, metric_label, number, percent, ratio, setting
from loadgen.result.model import PodShare, Result, Summary

_TITLES = {
    "compare": "Routing compared",
    "demo": "Routing policies compared",
    "simulate": "Routing simulated",
    "bench": "Benchmark",
    "replay": "Replay of a trace",
    "sweep": "Load sweep",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: its heading, the slot of its colour (None: no dot) and its cells."""

    heading: str
    slot: int | None
    cells: tuple[str, ...]
    warning: str = ""

    @property
    def dot(self) -> str:
        """Return the CSS colour of the dot."""
        return "" if self.slot is None else f"var(--arm{theme.slot_index(self.slot)})"


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a caption; on a phone each row becomes a card with the headers as labels."""

    caption: str
    first: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart that is part of the page."""

    plot: Plot
    svg: Markup
    legend: tuple[tuple[str, str, str], ...]
    """(label, CSS class of the swatch, CSS colour)."""


def render_html(result: Result) -> str:
    """Return the whole report. This draws every chart: about 0.5 s for four arms."""
    light, dark = theme.css_variables()
    return _template().render(
        title=_TITLES[result.command],
        meta=_meta(result),
        light=light,
        dark=dark,
        result=result,
        words=words_of(result),
        arms_table=arms_table(result) if result.arms else None,
        sweep_table=sweep_table(result) if result.sweep else None,
        contrast_table=contrast_table(result) if result.contrasts else None,
        pod_tables=pod_tables(result),
        failure_rows=failure_rows(result),
        figures=[_figure(plot) for plot in plots_of(result)],
        configuration={f"--{name.replace('_', '-')}": setting(v) for name, v in result.configuration.items()},
        order=" ".join(result.order),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("loadgen.output", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _meta(result: Result) -> str:
    try:
        created = datetime.fromisoformat(result.created).strftime("%Y-%m-%d %H:%M %Z")
    except ValueError:
        created = result.created
    return f"warmroute-loadgen {result.command} · {created} · {result.model} · seed {result.seed}"


def arms_table(result: Result) -> Table:
    """Return a table with one row for each arm."""
    slots, columns = theme.slots(result), shown_columns([arm.summary for arm in result.arms])
    rows = [
        Row(arm.name, slots[arm.name], tuple(c.cell(arm.summary) for c in columns), _warning(arm.summary))
        for arm in result.arms
    ]
    return Table(caption(result), "arm", tuple(c.title for c in columns), tuple(rows))


def _warning(summary: Summary) -> str:
    return "" if summary.validity.valid else "not valid"


def sweep_table(result: Result) -> Table:
    """Return a table with one row for each step of each arm."""
    slots, columns = theme.slots(result), shown_columns([p.summary for p in result.sweep])
    rows = [
        Row(
            f"{p.arm}, {step_text(p.rate, p.concurrency)}",
            slots[p.arm],
            tuple(c.cell(p.summary) for c in columns),
            "saturated" if p.saturated else _warning(p.summary),
        )
        for p in result.sweep
    ]
    return Table("steps of the sweep", "arm, step", tuple(c.title for c in columns), tuple(rows))


def contrast_table(result: Result) -> Table:
    """Return a table with one row for each metric and arm."""
    slots = theme.slots(result)
    rows = [
        Row(
            f"{metric_label(c.metric)}: {c.arm}",
            slots.get(c.arm),
            (interval(c.metric, c.difference), ratio(c.ratio), c.better, count(c.pairs), c.judgement),
        )
        for group in by_metric(result.contrasts).values()
        for c in group
    ]
    headers = ("difference", "ratio", "better is", "pairs", "judgement")
    return Table(f"arm against {result.contrasts[0].baseline}, with intervals", "metric", headers, tuple(rows))


def pod_tables(result: Result) -> list[Table]:
    """Return one table for each arm that used pods."""
    headers = (
        "requests",
        "prompt tokens",
        "cached tokens",
        "cached",
        "output tokens",
        "in flight mean",
        "in flight max",
    )
    counted = any(p.counted_prompt_tokens is not None for arm in result.arms for p in arm.summary.pods.values())
    tables = []
    for arm in result.arms:
        rows = tuple(
            Row(f"{i}. {name}", None, _pod_cells(arm.summary.pods[name], counted))
            for i, name in enumerate(sorted(arm.summary.pods), 1)
        )
        if rows:
            tables.append(Table(arm.name, "pod", (*headers, "cached by counters") if counted else headers, rows))
    return tables


def _pod_cells(pod: PodShare, counted: bool) -> tuple[str, ...]:
    cells = (
        count(pod.requests),
        count(pod.prompt_tokens),
        count(pod.cached_tokens),
        percent(pod.cached_tokens / pod.prompt_tokens if pod.prompt_tokens else None),
        count(pod.output_tokens),
        number(pod.mean_in_flight),
        count(pod.max_in_flight),
    )
    if not counted:
        return cells
    known = pod.counted_cached_tokens is not None and pod.counted_prompt_tokens
    return (*cells, percent((pod.counted_cached_tokens or 0) / (pod.counted_prompt_tokens or 1) if known else None))


def failure_rows(result: Result) -> list[tuple[str, str, int, str]]:
    """Return (arm, kind, count, one example of the server's message)."""
    return [
        (arm.name, kind, times, arm.summary.failure_details.get(kind, ""))
        for arm in result.arms
        for kind, times in sorted(arm.summary.failures.items(), key=lambda item: -item[1])
    ]


def _swatch(key: Key) -> str:
    dashed = key.look == "line" and key.slot is not None and theme.dash(key.slot) != "-"
    return "dashed" if dashed else key.look


def _figure(plot: Plot) -> Figure:
    legend = tuple(
        (key.label, _swatch(key), "var(--ink)" if key.slot is None else f"var(--arm{theme.slot_index(key.slot)})")
        for key in plot.keys
    )
    return Figure(plot, Markup(draw_svg(plot)), legend)
