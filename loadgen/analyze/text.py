"""An analysis as text for the terminal. Prompts are other people's text: none of it may control the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.analyze.model import Analysis
from loadgen.output.style.units import printable


def show(analysis: Analysis, console: Console) -> None:
    """Print everything, with the recommendation last, because the reader looks there when the program ends."""
    for line in facts(analysis):
        console.print(printable(line), markup=False)
    console.print()
    console.print(_cache_table(analysis))
    if analysis.block_loss:
        console.print(_block_table(analysis))
    if analysis.prefixes:
        console.print(_prefix_table(analysis))
    if analysis.findings:
        console.print(_finding_table(analysis))
    elif analysis.bytes_per_token is None:
        console.print("A trace of block ids has no text, so what breaks reuse is not known.\n", markup=False)
    else:
        console.print("No difference was found before text that prompts share.\n", markup=False)
    for sentence in analysis.recommendation.sentences:
        console.print(printable(sentence), markup=False)


def facts(analysis: Analysis) -> Iterator[str]:
    """Yield sentences about what the file holds and how much of it repeats."""
    a = analysis
    estimated = "" if a.bytes_per_token is None else f" (estimated, {a.bytes_per_token:g} bytes each)"
    yield f"{a.file}: {a.requests:,} requests, {a.prompt_tokens:,.0f} prompt tokens{estimated}"
    if a.span_s:
        yield f"over {a.span_s:,.0f} s, {a.requests / a.span_s:,.2f} requests/s"
    if a.skipped_lines:
        yield f"skipped {a.skipped_lines:,} lines without a prompt ({a.first_skipped})"
    if a.is_truncated:
        yield "stopped before the end of the file: --memory-mib is used up; rates hold for what was read"
    if not a.is_in_order:
        yield "times are not ascending: sort the file by time, because the rates depend on the order"
    yield f"{a.sharing_requests:.1%} of requests begin like earlier ones; {a.duplicate_requests:,} repeat one entirely"
    yield f"{a.distinct_tokens:,.0f} tokens are distinct: a cache of that size never evicts"
    if a.hit_rate_exact is not None:
        yield f"{a.hit_rate_exact:.1%} of prompt tokens are in a prefix seen before (infinite cache, to the token)"
    if a.reuse_gap:
        yield (
            f"a prefix recurs after {a.reuse_gap.median_s:,.1f} s (median), {a.reuse_gap.p90_s:,.1f} s (p90):"
            " it must stay cached that long"
        )


def _cache_table(a: Analysis) -> Table:
    table = Table(
        title=f"Ideal hit rate, share of prompt tokens (LRU, blocks of {a.block_tokens} tokens)", title_justify="left"
    )
    table.add_column("cache of a pod, tokens", justify="right")
    table.add_column("one pod", justify="right")
    if a.pods > 1:
        table.add_column(f"{a.pods} pods, random", justify="right")
        table.add_column(f"{a.pods} pods, perfect affinity", justify="right")
    for rate in a.caches:
        size = "infinite" if rate.cache_tokens is None else f"{rate.cache_tokens:,}"
        shown = [rate.one_pod, rate.random_routing, rate.perfect_affinity] if a.pods > 1 else [rate.one_pod]
        table.add_row(size, *[f"{value:.1%}" for value in shown])
    return table


def _block_table(a: Analysis) -> Table:
    table = Table(title="Whole blocks only (infinite cache)", title_justify="left")
    for name in ("block, tokens", "hit rate", "hits lost by rounding"):
        table.add_column(name, justify="right")
    for loss in a.block_loss:
        table.add_row(str(loss.block_tokens), f"{loss.hit_rate:.1%}", f"{loss.lost_hit_share:.1%}")
    return table


def _prefix_table(a: Analysis) -> Table:
    table = Table(title="What is shared most", title_justify="left")
    table.add_column("requests", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("begins", overflow="fold")
    for prefix in a.prefixes:
        tokens = f"{prefix.from_token:,} to {prefix.to_token:,}"
        table.add_row(f"{prefix.requests:,}", tokens, escape(printable(prefix.begins)))
    return table


def _finding_table(a: Analysis) -> Table:
    table = Table(title="What breaks reuse", title_justify="left")
    table.add_column("what")
    table.add_column("where", overflow="fold")
    table.add_column("for example", overflow="fold")
    table.add_column("cost, share of possible hits", justify="right")
    for finding in a.findings:
        examples = "\n".join(escape(printable(example)) for example in finding.examples)
        table.add_row(
            finding.kind.replace("_", " "), escape(printable(finding.where)), examples, f"{finding.cost_share:.0%}"
        )
    return table
