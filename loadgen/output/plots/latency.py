"""Latency charts: distribution of TTFT, parts of the latency, contrasts with intervals, blocks in order of time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from loadgen.output.plots.canvas import (
    Key,
    Plot,
    label_axes,
    log_range,
    log_ticks,
    log_time_axis,
    one_axes,
    share_axis,
)
from loadgen.output.style import theme
from loadgen.output.style.units import axis_time, clipped, metric_label, milliseconds
from loadgen.result.model import Arm, Contrast, Interval, Result, Summary

_HEIGHT = 236.0
_SMALLEST_MS = 1e-3
"""Below a microsecond, a logarithmic axis would show only the resolution of the clock."""


def arm_keys(result: Result, arms: Sequence[Arm]) -> tuple[Key, ...]:
    """Return a legend entry for each arm."""
    slots = theme.slots(result)
    return tuple(Key(arm.name, slots[arm.name]) for arm in arms)


def ttft_cdf(result: Result) -> Plot | None:
    """Draw the distribution of TTFT; None if no arm has quantiles."""
    arms = [arm for arm in result.arms if len(arm.summary.ttft.cdf_ms) > 1]
    if not arms:
        return None
    slots = theme.slots(result)
    banded = any(arm.ttft_cdf_low_ms for arm in arms)

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, _HEIGHT)
        low, high = log_range([v for arm in arms for v in arm.summary.ttft.cdf_ms if v >= _SMALLEST_MS])
        for arm in arms:
            colour = theme.colour(slots[arm.name])
            values = _positive(arm.summary.ttft.cdf_ms)
            share = np.linspace(0, 1, len(values))
            if len(arm.ttft_cdf_low_ms) == len(arm.ttft_cdf_high_ms) == len(values):
                ends = _positive(arm.ttft_cdf_low_ms), _positive(arm.ttft_cdf_high_ms)
                axes.fill_betweenx(share, *ends, color=colour, alpha=0.18, linewidth=0)
                low, high = min(low, ends[0].min() / 1.12), max(high, ends[1].max() * 1.12)
            axes.plot(values, share, color=colour, linewidth=1.8, linestyle=theme.dash(slots[arm.name]))
        axes.set_xscale("log")
        axes.set_xlim(max(low, _SMALLEST_MS), high)
        axes.set_ylim(0, 1.005)
        log_time_axis(axes.xaxis, max(low, _SMALLEST_MS), high)
        share_axis(axes.yaxis)
        label_axes(axes, "time to first token, log scale", "share of completed requests")

    medians = ", ".join(f"{a.name} {milliseconds(a.summary.ttft.median_ms)} ms" for a in arms)
    p99s = ", ".join(f"{a.name} {milliseconds(a.summary.ttft.p99_ms)} ms" for a in arms)
    caption = "Further left is faster. Completed requests, from the intended send time."
    caption += " Band: the range of the blocks of an arm." if banded else ""
    alt = f"Cumulative distribution of time to first token. Median: {medians}. 99th percentile: {p99s}."
    return Plot("ttft-cdf", "Time to first token", caption, alt, paint, arm_keys(result, arms), _HEIGHT)


def where_time_went(result: Result) -> Plot | None:
    """Draw each arm's mean E2E as wait before sending, queue and prefill, and decode, which add up to it exactly."""
    arms = [arm for arm in result.arms if _parts_ms(arm.summary)]
    if not arms:
        return None
    slots = theme.slots(result)
    height = 44.0 + 40 * len(arms)

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, height, left=17, bottom=34, top=4)
        total_max = max(sum(_parts_ms(arm.summary) or ()) for arm in arms)
        for row, arm in enumerate(arms):
            wait, first, decode = _parts_ms(arm.summary) or (0.0, 0.0, 0.0)
            colour = theme.colour(slots[arm.name])
            axes.barh(row, wait, 0.44, color="none", edgecolor=colour, hatch="/////", linewidth=0)
            axes.barh(row, first, 0.44, left=wait, color=colour)
            axes.barh(row, decode, 0.44, left=wait + first, color=colour, alpha=0.35)
            parts = [first, decode] if wait < 0.01 * total_max else [wait, first, decode]
            _bar_text(axes, row, arm.name, f"{' + '.join(milliseconds(part) for part in parts)} ms")
        axes.set_xlim(0, total_max * 1.02 or 1)
        axes.set_ylim(len(arms) - 0.5, -0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(axis_time))
        axes.set_xlabel("mean over completed requests", loc="right", labelpad=3)

    told = "; ".join(
        f"{arm.name}: before sending {milliseconds(wait)}, queue and prefill {milliseconds(first)},"
        f" decode {milliseconds(decode)} ms"
        for arm in arms
        for wait, first, decode in [_parts_ms(arm.summary) or (0.0, 0.0, 0.0)]
    )
    keys = (Key("before sending", None, "hatched"), Key("queue + prefill", None, "fill"), Key("decode", None, "pale"))
    caption = "Means. Before sending: the generator's lag and the wait for a cap on requests in flight."
    return Plot("time-parts", "Where the time went", caption, f"Stacked bars. {told}.", paint, keys, height)


def _bar_text(axes: Axes, row: float, name: str, numbers: str) -> None:
    at = axes.get_yaxis_transform()
    axes.text(0, row - 0.28, clipped(name, 30), va="bottom", transform=at)
    axes.text(1, row - 0.28, numbers, va="bottom", ha="right", transform=at, color=theme.SOFT)


def _parts_ms(s: Summary) -> tuple[float, float, float] | None:
    intended, sent, end = s.ttft.mean_ms, s.ttft_from_send.mean_ms, s.e2e.mean_ms
    if intended is None or sent is None or end is None:
        return None
    return max(intended - sent, 0.0), sent, max(end - intended, 0.0)


def contrast_forest(result: Result) -> Plot | None:
    """Draw the ratio of each arm to the baseline in each metric, grouped by metric; None without a contrast."""
    drawn = [c for c in result.contrasts if c.ratio.value > 0]
    if not drawn:
        return None
    slots = theme.slots(result)
    metrics = list(dict.fromkeys(c.metric for c in drawn))
    rows = len(drawn) + len(metrics)
    height = 46.0 + 15.0 * rows

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, height, left=17, bottom=34, top=4)
        low, high = _ratio_range(drawn)
        axes.set_xscale("log")
        axes.set_xlim(low, high * (high / low) ** 0.42)
        axes.axvline(1, color=theme.INK, linewidth=1)
        row = 0
        for metric in metrics:
            group = [c for c in drawn if c.metric == metric]
            _group_title(axes, row, metric, group[0].better)
            for i, contrast in enumerate(group, row + 1):
                _whisker(axes, i, contrast, slots.get(contrast.arm, 1), (low, high))
            row += len(group) + 1
        axes.set_ylim(rows - 0.4, -0.7)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(FixedLocator(ratio_ticks(low, high)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.set_xlabel(
            f"ratio to {clipped(result.baseline or drawn[0].baseline, 24)}, log scale", loc="right", labelpad=3
        )

    names = list(dict.fromkeys(c.arm for c in drawn))
    keys = (
        *(Key(name, slots.get(name, 1), "dot") for name in names),
        Key("hollow: no difference shown", None, "hollow"),
    )
    told = "; ".join(
        f"{metric_label(c.metric)} {c.arm} {c.ratio.value:.2f} times{_ends(c.ratio)}, {c.judgement}" for c in drawn
    )
    alt = f"Ratios to {drawn[0].baseline} with intervals. {told}."
    caption = "Dot: estimate. Line: confidence interval. A line that crosses 1x shows no difference."
    return Plot("contrasts", "Against the baseline", caption, alt, paint, keys, height)


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return at most about six round ratios between `low` and `high`, always with 1."""
    ticks = [t for t in log_ticks(low, high) if abs(math.log(t)) > 0.1 * math.log(high / low)]
    return sorted({*ticks, 1.0})


def _ratio_range(contrasts: Sequence[Contrast]) -> tuple[float, float]:
    """Return the ends of an axis around all estimates. Intervals widen it, each by at most a factor of 4."""
    values = [c.ratio.value for c in contrasts]
    low, high = min([1.0, *values]), max([1.0, *values])
    for c in contrasts:
        if c.ratio.low is not None and c.ratio.high is not None:
            low, high = min(low, max(c.ratio.low, low / 4)), max(high, min(c.ratio.high, high * 4))
    return min(low / 1.1, 0.8), max(high * 1.1, 1.25)


def _group_title(axes: Axes, row: int, metric: str, better: str) -> None:
    text = f"{metric_label(metric)} ({better} is better)"
    axes.text(
        0,
        row,
        text,
        va="center",
        transform=axes.get_yaxis_transform(),
        color=theme.SOFT,
        fontsize=9.5,
        bbox={"facecolor": theme.PAPER, "edgecolor": "none", "pad": 1.0},
    )


def _whisker(axes: Axes, row: int, contrast: Contrast, slot: int, limits: tuple[float, float]) -> None:
    colour, found = theme.colour(slot), contrast.ratio
    if found.low is not None and found.high is not None:
        ends = max(found.low, limits[0]), min(found.high, limits[1])
        axes.plot(ends, (row, row), color=colour, linewidth=1.6)
    filled = contrast.judgement in ("better", "worse")
    axes.plot(found.value, row, "o", color=colour, markersize=5.5, markerfacecolor=colour if filled else theme.PAPER)
    text = f"{found.value:.2f}x {contrast.judgement}" if filled else f"{found.value:.2f}x"
    axes.text(1, row, text, va="center", ha="right", transform=axes.get_yaxis_transform(), fontsize=9.5)


def _ends(found: Interval) -> str:
    return "" if found.low is None or found.high is None else f" ({found.low:.2f} to {found.high:.2f})"


def blocks_in_order(result: Result) -> Plot | None:
    """Draw each block's mean TTFT at its place in the run: a trend shows as a slope. None if no arm ran twice."""
    points = {arm.name: block_points(result, arm) for arm in result.arms}
    if max((len(found) for found in points.values()), default=0) < 2:
        return None
    slots = theme.slots(result)
    arms = [arm for arm in result.arms if points[arm.name]]

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, _HEIGHT)
        for arm in arms:
            x, y = zip(*points[arm.name], strict=True)
            colour, style = theme.colour(slots[arm.name]), theme.dash(slots[arm.name])
            axes.plot(x, y, marker="o", markersize=4.5, linewidth=1.3, color=colour, linestyle=style)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.5, max(x for found in points.values() for x, _ in found) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(axis_time))
        axes.grid(visible=False, axis="x")
        label_axes(axes, "block, in the order they ran", "mean time to first token")

    told = "; ".join(f"{a.name}: {', '.join(milliseconds(y) for _, y in points[a.name])} ms" for a in arms)
    caption = "One dot for each block. If lines climb or fall together, the machine changed, not the policy."
    alt = f"Mean time to first token of each block. {told}."
    return Plot("blocks", "Block by block", caption, alt, paint, arm_keys(result, arms), _HEIGHT)


def block_points(result: Result, arm: Arm) -> list[tuple[int, float]]:
    """Return (place in the run, mean TTFT in ms) of blocks with completed requests. Without an order, places count from
    1."""
    places = [i for i, name in enumerate(result.order, 1) if name == arm.name]
    if len(places) != len(arm.blocks):
        places = list(range(1, len(arm.blocks) + 1))
    means = [block.ttft.mean_ms for block in arm.blocks]
    return [(place, mean) for place, mean in zip(places, means, strict=True) if mean is not None]


def reuse_bars(result: Result) -> Plot | None:
    """Draw the cached share of prompt tokens beside the attainable share; None if no server reported the former."""
    arms = [arm for arm in result.arms if arm.summary.reuse.cached_token_rate is not None]
    if not arms:
        return None
    slots = theme.slots(result)
    height = 44.0 + 40 * len(arms)

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, height, left=17, bottom=34, top=4)
        for row, arm in enumerate(arms):
            reuse = arm.summary.reuse
            axes.barh(row, reuse.cached_token_rate or 0.0, 0.44, color=theme.colour(slots[arm.name]))
            told = f"{reuse.cached_token_rate:.1%}"
            if reuse.attainable_rate is not None:
                axes.plot([reuse.attainable_rate] * 2, [row - 0.2, row + 0.2], color=theme.INK, linewidth=1.6)
                told += f" of {reuse.attainable_rate:.1%}"
            _bar_text(axes, row, arm.name, told)
        axes.set_xlim(0, 1)
        axes.set_ylim(len(arms) - 0.5, -0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        share_axis(axes.xaxis)
        axes.set_xlabel("share of prompt tokens", loc="right", labelpad=3)

    attainable = any(arm.summary.reuse.attainable_rate is not None for arm in arms)
    told = "; ".join(
        f"{a.name} {a.summary.reuse.cached_token_rate or 0:.1%}"
        + (f" of {a.summary.reuse.attainable_rate:.1%}" if a.summary.reuse.attainable_rate is not None else "")
        for a in arms
    )
    caption = "The rest had to be prefilled." + (" Tick: an infinite cache that all pods share." if attainable else "")
    keys = (Key("attainable", None),) if attainable else ()
    return Plot(
        "reuse",
        "Prompt tokens served from cache",
        caption,
        f"Cached share of prompt tokens{' and what was attainable' if attainable else ''}. {told}.",
        paint,
        keys,
        height,
    )


def _positive(values: Sequence[float]) -> npt.NDArray[np.float64]:
    positive: npt.NDArray[np.float64] = np.maximum(np.asarray(values, np.float64), _SMALLEST_MS)
    return positive
