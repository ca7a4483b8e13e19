"""All charts of a Result, in reading order."""

from __future__ import annotations

from loadgen.output.plots.canvas import Plot
from loadgen.output.plots.latency import blocks_in_order, contrast_forest, reuse_bars, ttft_cdf, where_time_went
from loadgen.output.plots.pods import hits_over_time, in_flight_per_pod, load_over_time, offered_load, tokens_per_pod
from loadgen.output.plots.sweep import sweep_goodput, sweep_ttft
from loadgen.result.model import Result

_PAINTERS = (
    sweep_goodput,
    sweep_ttft,
    ttft_cdf,
    contrast_forest,
    where_time_went,
    reuse_bars,
    blocks_in_order,
    load_over_time,
    hits_over_time,
    tokens_per_pod,
    in_flight_per_pod,
    offered_load,
)


def plots_of(result: Result) -> list[Plot]:
    """Return the charts that have something to show."""
    return [plot for painter in _PAINTERS if (plot := painter(result)) is not None]
