"""The numbers of a Summary: those that tables show (terminal, Markdown and HTML), and all of them for the CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.measure.validity import in_words
from loadgen.output.style.units import MISSING, count, milliseconds, number, percent
from loadgen.result.model import Arm, Contrast, Distribution, Result, Summary

Value = float | int | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison. An `optional` column appears only if some arm has a value other than 0."""

    header: str
    unit: str
    value: Callable[[Summary], float | None]
    show: Callable[[float | None], str]
    optional: bool = False

    @property
    def title(self) -> str:
        """Return the header with its unit."""
        return f"{self.header} ({self.unit})" if self.unit else self.header

    def cell(self, summary: Summary) -> str:
        """Return the text of a cell."""
        return self.show(self.value(summary))


COLUMNS = (
    Column("done", "", lambda s: s.completed, count),
    Column("failed", "", lambda s: s.failed, count),
    Column("unsent", "", lambda s: s.not_sent, count, optional=True),
    Column("cached", "", lambda s: s.reuse.cached_token_rate, percent),
    Column("achieved", "", lambda s: s.reuse.achieved_share, percent, optional=True),
    Column("TTFT mean", "ms", lambda s: s.ttft.mean_ms, milliseconds),
    Column("TTFT p50", "ms", lambda s: s.ttft.median_ms, milliseconds),
    Column("TTFT p90", "ms", lambda s: s.ttft.p90_ms, milliseconds),
    Column("TTFT p99", "ms", lambda s: s.ttft.p99_ms, milliseconds),
    Column("TPOT mean", "ms", lambda s: s.tpot.mean_ms, milliseconds),
    Column("E2E mean", "ms", lambda s: s.e2e.mean_ms, milliseconds),
    Column("done per s", "", lambda s: s.request_throughput, number),
    Column("goodput", "req/s", lambda s: s.goodput.request_goodput if s.goodput else None, number, optional=True),
    Column("good", "", lambda s: s.goodput.share if s.goodput else None, percent, optional=True),
    Column("imbalance", "", lambda s: s.imbalance, number),
    Column("lag p99", "ms", lambda s: s.lag.p99_ms, milliseconds),
)


def shown_columns(summaries: Sequence[Summary]) -> list[Column]:
    """Return the columns that have something to say about these summaries."""
    return [c for c in COLUMNS if not c.optional or any(c.value(s) is not None and c.value(s) != 0 for s in summaries)]


def caption(result: Result) -> str:
    """Return one line that says what the table of arms holds."""
    what = "TTFT and E2E from the intended send time, over completed requests"
    return f"each arm at its knee; {what}" if result.sweep else what


def step_text(rate: float | None, concurrency: int | None) -> str:
    """Return the step of a sweep in words."""
    if rate is not None:
        return f"{rate:g} req/s"
    return MISSING if concurrency is None else f"{concurrency} sessions at a time"


def by_metric(contrasts: Sequence[Contrast]) -> dict[str, list[Contrast]]:
    """Group contrasts by metric; metrics and contrasts keep the order of their first appearance."""
    return {
        metric: [c for c in contrasts if c.metric == metric] for metric in dict.fromkeys(c.metric for c in contrasts)
    }


@dataclass(frozen=True, slots=True)
class Words:
    """The text about a Result: first what makes it invalid, then the verdict's head, then the rest."""

    invalid: tuple[str, ...]
    headline: str
    rest: tuple[str, ...]


def words_of(result: Result) -> Words:
    """Return the text: INVALID lines of the verdict, and the arms' own reasons if the verdict does not repeat them."""
    said = [line for line in result.verdict if line.startswith("INVALID")]
    unsaid = in_words({arm.name: arm.summary.validity for arm in result.arms if not _is_said(arm, said)})
    others = [line for line in result.verdict if not line.startswith("INVALID")]
    return Words((*said, *([unsaid] if unsaid else [])), others[0] if others else "", tuple(others[1:]))


def _is_said(arm: Arm, lines: Sequence[str]) -> bool:
    return any(arm.name in line and all(reason in line for reason in arm.summary.validity.reasons) for line in lines)


def primary_arm(result: Result) -> Arm | None:
    """Return the arm that a one-arm command measured."""
    return result.arms[0] if result.arms else None


def measures(s: Summary) -> dict[str, Value]:
    """Return every scalar of a Summary under a stable name that ends in its unit, if it has one."""
    goodput = s.goodput
    return {
        "planned": s.planned,
        "completed": s.completed,
        "failed": s.failed,
        "not_sent": s.not_sent,
        "duration_s": s.duration_s,
        "request_throughput_per_s": s.request_throughput,
        "output_throughput_tokens_per_s": s.output_throughput,
        "total_token_throughput_tokens_per_s": s.total_token_throughput,
        "max_output_tokens_per_s": s.max_output_tokens_per_s,
        "max_concurrent_requests": s.max_concurrent_requests,
        "prompt_tokens": s.prompt_tokens,
        "cached_tokens": s.cached_tokens,
        "output_tokens": s.output_tokens,
        "cached_token_rate": s.reuse.cached_token_rate,
        "counted_cached_token_rate": s.reuse.counted_rate,
        "counters_agree": s.reuse.counters_agree,
        "attainable_cached_token_rate": s.reuse.attainable_rate,
        "achieved_share": s.reuse.achieved_share,
        "duplicate_prompts": s.reuse.duplicate_prompts,
        "duplicated_prefill_tokens": s.reuse.duplicated_prefill_tokens,
        "goodput_share": goodput.share if goodput else None,
        "request_goodput_per_s": goodput.request_goodput if goodput else None,
        **_statistics("ttft", s.ttft),
        "ttft_p99_with_failures_ms": s.ttft.with_failures_p99_ms,
        **_statistics("ttft_from_send", s.ttft_from_send),
        **_statistics("tpot", s.tpot),
        **_statistics("itl", s.itl),
        **_statistics("e2e", s.e2e),
        **_statistics("e2e_from_send", s.e2e_from_send),
        **_statistics("lag", s.lag),
        "lag_share": s.validity.lag_share,
        "lag_p99_share": s.validity.lag_p99_share,
        "valid": s.validity.valid,
        "imbalance": s.imbalance,
        "request_imbalance": s.request_imbalance,
        "jain_index": s.jain_index,
        "pods": len(s.pods),
    }


def _statistics(name: str, d: Distribution) -> dict[str, Value]:
    return {
        f"{name}_mean_ms": d.mean_ms,
        f"{name}_median_ms": d.median_ms,
        f"{name}_std_ms": d.std_ms,
        f"{name}_p90_ms": d.p90_ms,
        f"{name}_p95_ms": d.p95_ms,
        f"{name}_p99_ms": d.p99_ms,
    }
