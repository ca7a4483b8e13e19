"""The result as Markdown for a pull request: verdict, tables, configuration. Names never become markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from loadgen.output.columns import by_metric, caption, shown_columns, step_text, words_of
from loadgen.output.style.units import count, interval, metric_label, ratio, setting
from loadgen.result.model import Result

# '@' would notify the person with that name, '#' would link an issue.
_MARKUP = re.compile(r"([\\`*\[\]<>#|~@&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_CONTRAST_HEADERS = ("metric", "arm", "difference", "ratio", "pairs", "judgement")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;", "#": "&#35;", "|": "&#124;"}


def render_markdown(result: Result) -> str:
    """Return the report; sections without content are left out."""
    sections = [
        f"### warmroute-loadgen {result.command}: {escaped(result.model)}",
        *_verdict(result),
        *_arms(result),
        *_contrasts(result),
        *_sweep(result),
        _configuration(result),
    ]
    return "\n\n".join(sections) + "\n"


def escaped(text: str) -> str:
    """Return the text as one line without markup."""
    plain = " ".join(text.split())
    return _MARKUP.sub(lambda found: _ENTITIES.get(found[1], f"\\{found[1]}"), plain)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a GitHub table, first column left-aligned, the others right-aligned; cells must already be escaped."""
    head = [f"| {' | '.join(headers)} |", f"|:--{'|--:' * (len(headers) - 1)}|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _verdict(result: Result) -> list[str]:
    words = words_of(result)
    bold = [f"**{escaped(line)}**" for line in (*words.invalid, words.headline) if line]
    rest = [f"- {escaped(line)}" for line in words.rest]
    lines = [*rest, *(f"- **Caution:** {escaped(line)}" for line in result.cautions)]
    return [*bold, "\n".join(lines)] if lines else bold


def _arms(result: Result) -> list[str]:
    if not result.arms:
        return []
    columns = shown_columns([arm.summary for arm in result.arms])
    rows = [[escaped(arm.name), *(column.cell(arm.summary) for column in columns)] for arm in result.arms]
    return [f"Arms ({caption(result)}):", table(["arm", *(column.title for column in columns)], rows)]


def _contrasts(result: Result) -> list[str]:
    if not result.contrasts:
        return []
    rows = [
        [
            escaped(metric_label(c.metric)),
            escaped(c.arm),
            interval(c.metric, c.difference),
            ratio(c.ratio),
            count(c.pairs),
            c.judgement if c.judgement.startswith("not ") else f"**{c.judgement}**",
        ]
        for group in by_metric(result.contrasts).values()
        for c in group
    ]
    return [f"Against {escaped(result.contrasts[0].baseline)}:", table(_CONTRAST_HEADERS, rows)]


def _sweep(result: Result) -> list[str]:
    if not result.sweep:
        return []
    columns = shown_columns([point.summary for point in result.sweep])
    rows = [
        [
            escaped(point.arm),
            step_text(point.rate, point.concurrency) + (" (saturated)" if point.saturated else ""),
            *(column.cell(point.summary) for column in columns),
        ]
        for point in result.sweep
    ]
    return [table(["arm", "step", *(column.title for column in columns)], rows)]


def _configuration(result: Result) -> str:
    facts = {
        "model": result.model,
        "created": result.created,
        "seed": str(result.seed),
        "isolation": result.isolation,
        "order of blocks": " ".join(result.order),
        **{f"workload: {name}": text for name, text in result.workload.items()},
        **result.facts,
        **{f"--{name.replace('_', '-')}": setting(value) for name, value in result.configuration.items()},
    }
    rows = [[escaped(name), escaped(text)] for name, text in facts.items() if text]
    body = table(["setting", "value"], rows).replace("|:--|--:|", "|:--|:--|")
    return f"<details><summary>Configuration</summary>\n\n{body}\n\n</details>"
