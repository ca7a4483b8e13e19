"""A comparison as a table in the terminal, as `result.json` and as one self-contained `report.html`."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.table import Table

from loadgen.compare import ArmResult, Comparison
from loadgen.metrics import DEFINITIONS, ArmMetrics
from loadgen.plots import colours, draw_plots
from loadgen.verdict import METHOD, contrasts, verdict

SCHEMA_VERSION = 1
_COLUMNS = ("cached", "TTFT mean", "p50", "p90", "p99", "E2E mean", "req/s", "imbalance", "failed")


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where the files of a report lie."""

    html: Path
    json: Path


def write_report(comparison: Comparison, folder: Path, facts: dict[str, str] | None = None) -> ReportPaths:
    """Write report.html and result.json into `folder`. `facts` are further lines of configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(folder / "report.html", folder / "result.json")
    paths.json.write_bytes(orjson.dumps(result_json(comparison, facts or {}), option=orjson.OPT_INDENT_2))
    paths.html.write_text(render_html(comparison, facts or {}), encoding="utf-8")
    return paths


def result_json(comparison: Comparison, facts: dict[str, str]) -> dict[str, Any]:
    """The content of result.json. Times in milliseconds where the name says so, else seconds."""
    return {
        "schema": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict(comparison),
        "baseline": comparison.baseline.name,
        "contrasts": [{**asdict(c), "judgement": c.judgement} for c in contrasts(comparison)],
        "arms": {arm.name: _arm_json(arm.metrics) for arm in comparison.arms},
        "model": comparison.model,
        "tokens_per_word": comparison.tokens_per_word,
        "isolation": comparison.isolation,
        "configuration": comparison.settings.model_dump(mode="json", exclude={"config"}),
        "facts": facts,
        "definitions": _terms(),
    }


def table(comparison: Comparison) -> Table:
    """The comparison for a terminal; times in milliseconds."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="times in milliseconds", title_style="dim")
    out.add_column("policy", no_wrap=True)
    for name in _COLUMNS:
        out.add_column(name, justify="right", no_wrap=True)
    for arm in comparison.arms:
        out.add_row(arm.name, *_cells(arm.metrics))
    return out


def render_html(comparison: Comparison, facts: dict[str, str]) -> str:
    """The whole report as one HTML document without a reference to anything outside it."""
    lines = verdict(comparison)
    headline = f'<p class="headline">{html.escape(lines[0])}</p>'
    rest = "".join(f"<li>{html.escape(line)}</li>" for line in lines[1:])
    plots = "".join(
        f'<figure role="img" aria-label="{html.escape(plot.title)}"><h3>{html.escape(plot.title)}</h3>{plot.svg}'
        f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        for plot in draw_plots(comparison)
    )
    configuration = {
        "model": comparison.model,
        **facts,
        "cache isolation": comparison.isolation,
        "tokens per word": f"{comparison.tokens_per_word:g}",
        **{
            f"--{name.replace('_', '-')}": ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in comparison.settings.model_dump(mode="json", exclude={"config", "model"}).items()
        },
    }
    sections = (
        f"<h1>Routing policies compared</h1><p class=meta>warmroute load generator, {_now()}</p>{headline}",
        f"<ul>{rest}</ul>" if rest else "",
        _html_table(comparison),
        f'<div class="plots">{plots}</div>',
        f"<details open><summary>What the numbers mean</summary>{_html_terms(_terms())}</details>",
        f"<details><summary>Configuration</summary>{_html_terms(configuration)}</details>",
    )
    css = resources.files("loadgen").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Routing policies compared</title><style>{css}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _html_table(comparison: Comparison) -> str:
    palette = colours(comparison)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("policy", *_COLUMNS))
    rows = "".join(_html_row(arm, palette[arm.name]) for arm in comparison.arms)
    return f"<table><caption>times in milliseconds</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _html_row(arm: ArmResult, colour: str) -> str:
    dot = f'<span class="dot" style="background:{colour}"></span>'
    cells = "".join(
        f'<td data-label="{html.escape(name)}">{html.escape(cell)}</td>'
        for name, cell in zip(_COLUMNS, _cells(arm.metrics), strict=True)
    )
    return f"<tr><th scope=row>{dot}{html.escape(arm.name)}</th>{cells}</tr>"


def _terms() -> dict[str, str]:
    return {**DEFINITIONS, "method": METHOD}


def _html_terms(terms: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in terms.items()) + "</dl>"


def _cells(m: ArmMetrics) -> tuple[str, ...]:
    failed = f"{m.failed}" if not m.not_sent else f"{m.failed} (+{m.not_sent} unsent)"
    return (
        f"{m.cached_token_rate:.1%}",
        *(f"{value:,.0f}" for value in (m.ttft.mean_ms, m.ttft.median_ms, m.ttft.p90_ms, m.ttft.p99_ms, m.e2e.mean_ms)),
        f"{m.request_throughput:.2f}",
        f"{m.imbalance:.2f}",
        failed,
    )


def _arm_json(m: ArmMetrics) -> dict[str, Any]:
    distributions = {
        f"{statistic.removesuffix('_ms')}_{name}_ms": value
        for name in ("ttft", "tpot", "e2e", "lag")
        for statistic, value in asdict(getattr(m, name)).items()
    }
    plain = {k: v for k, v in asdict(m).items() if k not in ("ttft", "tpot", "e2e", "lag")}
    return {**plain, **distributions}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
