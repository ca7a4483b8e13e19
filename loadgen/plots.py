"""Plots of a comparison as inline SVG: text stays text, nothing is fetched, ids do not clash between plots."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from loadgen.compare import ArmResult, Comparison
from loadgen.metrics import PodLoad, completed, ttft_s

# Okabe & Ito's palette, distinguishable by the colour-blind (https://jfly.uni-koeln.de/color/); the baseline is grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A500")
_BASELINE_COLOUR = "#7A7A7A"
_INCHES = (5.0, 3.3)  # 360 pt wide: text keeps its size on a phone and grows with the column on a desktop
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.labelcolor": "#444444",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn figure with what a reader needs to understand it."""

    title: str
    caption: str
    svg: str


def draw_plots(comparison: Comparison) -> list[Plot]:
    """All plots of the report, in reading order."""
    painters: list[tuple[str, str, Callable[[Axes, Comparison], None]]] = [
        ("Time to first token, all requests", "Further left is faster. Logarithmic time axis.", _ttft_cdf),
        ("Time to first token, mean and p99", "Solid: mean. Pale: 99th percentile.", _ttft_bars),
        ("Prompt tokens served from cache", "The rest had to be prefilled.", _hit_rate),
        ("Requests per pod", "Pods in the order of their names.", _requests_per_pod),
        ("Requests in flight per pod", "Mean over the arm: what the imbalance is computed from.", _in_flight_per_pod),
        (
            "Time to first token over the run",
            "Dots: requests by intended send time. Lines: running median.",
            _over_time,
        ),
    ]
    return [
        Plot(title, caption, _svg(paint, comparison, f"plot{i}")) for i, (title, caption, paint) in enumerate(painters)
    ]


def colours(comparison: Comparison) -> dict[str, str]:
    """One colour per arm, grey for the baseline."""
    others = [arm.name for arm in comparison.arms if arm is not comparison.baseline]
    return {comparison.baseline.name: _BASELINE_COLOUR} | {
        name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(others)
    }


def _svg(paint: Callable[[Axes, Comparison], None], comparison: Comparison, prefix: str) -> str:
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": prefix}):  # type: ignore[arg-type]  # keys typed as literals
        figure = Figure(figsize=_INCHES, layout="constrained")
        paint(figure.add_subplot(), comparison)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


def _ttft_cdf(axes: Axes, comparison: Comparison) -> None:
    palette = colours(comparison)
    for arm in comparison.arms:
        values = np.sort(_ttfts_ms(arm))
        if values.size:
            share = np.arange(1, values.size + 1) / values.size
            axes.step(values, share, where="post", color=palette[arm.name], linewidth=1.8, label=arm.name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_milliseconds))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("TTFT")
    axes.set_ylabel("share of requests")
    _legend(axes)


def _ttft_bars(axes: Axes, comparison: Comparison) -> None:
    palette = colours(comparison)
    rows = np.arange(len(comparison.arms))
    for shift, alpha, values in (
        (-0.2, 1.0, [arm.metrics.ttft.mean_ms for arm in comparison.arms]),
        (0.2, 0.4, [arm.metrics.ttft.p99_ms for arm in comparison.arms]),
    ):
        tints = [palette[arm.name] for arm in comparison.arms]
        bars = axes.barh(rows + shift, values, 0.38, color=tints, alpha=alpha)
        axes.bar_label(bars, [_milliseconds(value) for value in values], padding=3, color="#333333")
    _label_rows(axes, comparison)
    axes.margins(x=0.2)
    axes.xaxis.set_major_formatter(FuncFormatter(_milliseconds))
    axes.set_xlabel("TTFT")


def _hit_rate(axes: Axes, comparison: Comparison) -> None:
    palette = colours(comparison)
    rates = [arm.metrics.cached_token_rate for arm in comparison.arms]
    bars = axes.barh(range(len(rates)), rates, 0.6, color=[palette[arm.name] for arm in comparison.arms])
    axes.bar_label(bars, [f"{rate:.0%}" for rate in rates], padding=3, color="#333333")
    _label_rows(axes, comparison)
    axes.set_xlim(0, 1.12)
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("cached share of prompt tokens")


def _requests_per_pod(axes: Axes, comparison: Comparison) -> None:
    _bars_per_pod(axes, comparison, lambda load: load.requests)
    axes.set_ylabel("requests")


def _in_flight_per_pod(axes: Axes, comparison: Comparison) -> None:
    _bars_per_pod(axes, comparison, lambda load: load.mean_in_flight)
    axes.set_ylabel("mean requests in flight")


def _bars_per_pod(axes: Axes, comparison: Comparison, height: Callable[[PodLoad], float]) -> None:
    palette = colours(comparison)
    pods = sorted({pod for arm in comparison.arms for pod in arm.metrics.pods})
    width = 0.8 / len(comparison.arms)
    for i, arm in enumerate(comparison.arms):
        heights = [height(arm.metrics.pods[pod]) for pod in pods]
        places = np.arange(len(pods)) + (i - (len(comparison.arms) - 1) / 2) * width
        axes.bar(places, heights, width * 0.92, color=palette[arm.name], label=arm.name)
    axes.set_xticks(range(len(pods)), [f"pod {i + 1}" for i in range(len(pods))])
    axes.grid(visible=False, axis="x")
    _legend(axes)


def _over_time(axes: Axes, comparison: Comparison) -> None:
    palette = colours(comparison)
    for arm in comparison.arms:
        records = sorted(completed(arm.run.records), key=lambda record: record.intended_s)
        if not records:
            continue
        times = np.array([record.intended_s - arm.run.start_s for record in records])
        values = np.array([ttft_s(record) * 1000 for record in records])
        axes.plot(times, values, ".", color=palette[arm.name], alpha=0.4, markersize=5, markeredgewidth=0)
        axes.plot(times, _running_median(values), color=palette[arm.name], linewidth=1.6, label=arm.name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_milliseconds))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_xlabel("seconds since the arm's start")
    axes.set_ylabel("TTFT")
    _legend(axes)


def _running_median(values: np.ndarray) -> list[float]:
    reach = max(2, len(values) // 12)
    return [float(np.median(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]


def _label_rows(axes: Axes, comparison: Comparison) -> None:
    axes.set_yticks(range(len(comparison.arms)), [arm.name for arm in comparison.arms])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside upper center", ncols=2)


def _ttfts_ms(arm: ArmResult) -> Sequence[float]:
    return [ttft_s(record) * 1000 for record in completed(arm.run.records)]


def _milliseconds(value: float, _: float | None = None) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
