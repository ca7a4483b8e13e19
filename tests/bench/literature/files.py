"""The tables as Markdown, JSON and one HTML page with charts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path

from loadgen.output.plots.canvas import draw_svg
from loadgen.output.save import write_whole
from loadgen.output.style import theme
from loadgen.simulate.build import emulated_pods, profile_words
from tests.bench.literature.cases import (
    CONCURRENCY,
    KINDS,
    LOAD,
    NO_CACHE,
    OUTPUT_TOKENS,
    PODS,
    PROFILE,
    QUESTION_TOKENS,
    SHAPE_RATE,
    SHARED,
    SHARING_KV_TOKENS,
    SHARING_LEVELS,
    SHARING_PREFIXES,
    SHARING_PROMPT_TOKENS,
    SYSTEM_TOKENS,
    WORKLOAD_ARMS,
)
from tests.bench.literature.plots import KEYS, charts
from tests.bench.literature.run import PAYS, Row, Tables, gains_of, pays_from


def save(tables: Tables, folder: Path) -> list[Path]:
    """Write literature.md, literature.json and literature.html. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join("\n".join((f"**{title}**", "", *lines, "", "")) for title, lines in sections(tables).items())
    content = {"profile": profile_words(emulated_pods(1, PROFILE)[0]), **asdict(tables), "pays_from": _pays(tables)}
    return [
        write_whole(folder / "literature.md", text.encode()),
        write_whole(folder / "literature.json", (json.dumps(content, indent=1) + "\n").encode()),
        write_whole(folder / "literature.html", _page(tables).encode()),
    ]


def sections(tables: Tables) -> dict[str, list[str]]:
    """Return each table's lines of Markdown, by title."""
    return {
        "80 % of requests share one system prompt": list(_shape(tables)),
        "By workload": list(_workloads(tables)),
        "By sharing level": list(_sharing(tables)),
    }


def _shape(tables: Tables) -> Iterator[str]:
    yield (
        f"{PODS} pods ({PROFILE}), {SHARED:.0%} of requests under one system prompt of {SYSTEM_TOKENS:,} tokens with a"
        f" question of {QUESTION_TOKENS}, the others {SYSTEM_TOKENS:,} tokens of their own, answers of {OUTPUT_TOKENS},"
        f" {SHAPE_RATE:g} requests/s (Poisson){_over(tables)}."
    )
    yield ""
    yield "| policy | hit rate | requests max/mean | load max/mean | mean TTFT ms | p99 TTFT ms | pods of the prompt |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in tables.shape:
        yield (
            f"| {row.arm} | {row.mean('hit_rate'):.3f} | {row.mean('request_imbalance'):.2f} |"
            f" {row.mean('load_imbalance'):.2f} | {row.mean('mean_ttft_ms'):,.0f} | {row.mean('p99_ttft_ms'):,.0f} |"
            f" {row.mean('prefix_pods'):.1f} |"
        )


def _workloads(tables: Tables) -> Iterator[str]:
    none, robin, ours = WORKLOAD_ARMS
    yield (
        f"{PODS} pods ({PROFILE}), Poisson at {LOAD:g} of what they serve without caching, kept busy by"
        f" {CONCURRENCY} sessions at a time{_over(tables)}. Mean TTFT in ms; without caching the"
        " least loaded pod takes a request."
    )
    yield ""
    yield (
        f"| workload | sessions/s | hit rate {robin} | {ours} | TTFT {none} | {robin} | {ours} |"
        f" caching saves ({robin}) | with affinity ({ours}) | affinity against {robin} |"
    )
    yield "|---|" + "--:|" * 9
    rows = {(row.case, row.arm): row for row in tables.workloads}
    for kind in KINDS:
        n, r, o = (rows[kind.name, arm] for arm in WORKLOAD_ARMS)
        ttft = [row.mean("mean_ttft_ms") for row in (n, r, o)]
        yield (
            f"| {kind.name} | {tables.rates[kind.name]:.1f} | {r.mean('hit_rate'):.2f} | {o.mean('hit_rate'):.2f} |"
            f" {ttft[0]:,.0f} | {ttft[1]:,.0f} | {ttft[2]:,.0f} | {_less(ttft[1], ttft[0])} |"
            f" {_less(ttft[2], ttft[0])} | {_less(ttft[2], ttft[1])} |"
        )
    yield ""
    yield "; ".join(f"{kind.name}: {kind.about}" for kind in KINDS) + "."


def _sharing(tables: Tables) -> Iterator[str]:
    none, robin, ours = WORKLOAD_ARMS
    yield (
        f"{PODS} pods ({PROFILE} with {SHARING_KV_TOKENS:,} tokens of KV each), prompts of {SHARING_PROMPT_TOKENS:,}"
        f" tokens of which a share is one of {SHARING_PREFIXES} common prefixes, answers of 128,"
        f" {CONCURRENCY} requests at a time{_over(tables)}. Requests/s."
    )
    yield ""
    yield f"| shared part of a prompt | {none} | {robin} | {ours} | caching ({robin}) | affinity over {robin} |"
    yield "|---|" + "--:|" * 5
    rows: dict[tuple[str, str], Row] = {(row.case, row.arm): row for row in tables.sharing}
    cached, affine = dict(gains_of(tables, robin, none)), dict(gains_of(tables, ours, robin))
    for level in SHARING_LEVELS:
        rates = " | ".join(f"{rows[f'{level:g}', arm].mean('throughput'):.1f}" for arm in WORKLOAD_ARMS)
        yield f"| {level:.0%} | {rates} | {cached[level]:+.1%} | {affine[level]:+.1%} |"
    yield ""
    yield " ".join(_pays(tables).values())


def _pays(tables: Tables) -> dict[str, str]:
    none, robin, ours = WORKLOAD_ARMS
    asked = {
        "caching": ("Caching under round robin", robin, none),
        "affinity": ("Routing by cache", ours, robin),
        "both": ("Both together", ours, none),
    }
    return {name: _pays_words(tables, *arms) for name, arms in asked.items()}


def _pays_words(tables: Tables, what: str, arm: str, base: str) -> str:
    level = pays_from(tables, arm, base)
    if level is None:
        return f"{what} brings less than {PAYS:.0%} of throughput at every level."
    return f"{what} brings {PAYS:.0%} of throughput or more (against {base}) once {level:.0%} of a prompt is shared."


def _less(now: float, before: float) -> str:
    return f"{1 - now / before:.0%}"


def _over(tables: Tables) -> str:
    return f"; means over seeds {', '.join(map(str, tables.seeds))}"


def _page(tables: Tables) -> str:
    light, dark = theme.css_variables()
    css = files("loadgen.output").joinpath("report.css").read_text(encoding="utf-8")
    legend = "".join(
        f'<li><span class="swatch line" style="color:var(--arm{theme.slot_index(key.slot or 0)})"></span>'
        f"{escape(key.label)}</li>"
        for key in KEYS
    )
    figures = "".join(
        f'<figure role="img" aria-label="{escape(plot.alt)}"><h2>{escape(plot.title)}</h2>'
        f'<ul class="legend">{legend if plot.keys else ""}</ul>{draw_svg(plot)}'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot in charts(tables)
    )
    body = "".join(f"<h2>{escape(title)}</h2>{_html(lines)}" for title, lines in sections(tables).items())
    about = escape(f"{PROFILE}: {profile_words(emulated_pods(1, PROFILE)[0])}. Without caching: {NO_CACHE!r}.")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>What caching and routing bring</title><style>:root {{ {light} }}"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{css}</style></head><body><main>"
        f'<h1>What caching and routing bring</h1><p class="meta">simulated; {about}</p>'
        f'<div class="plots">{figures}</div>{body}</main></body></html>\n'
    )


def _html(lines: list[str]) -> str:
    """Return the paragraphs and the one table of a section as HTML."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    text = [line for line in lines if line and not line.startswith("|")]
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f'<td data-label="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(rows[0][1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows[2:]
    )
    table = f'<div class="scroll wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<p>{escape(text[0])}</p>{table}" + "".join(f"<p>{escape(line)}</p>" for line in text[1:])
