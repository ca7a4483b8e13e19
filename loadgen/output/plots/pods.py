"""Charts of the pods: load and hit rate over time, and each pod's tokens and requests; one panel for each arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadgen.output.plots.canvas import Key, Plot, label_axes, one_axes, panel_axes, panels_height, share_axis
from loadgen.output.plots.latency import arm_keys
from loadgen.output.style import theme
from loadgen.output.style.units import count, number
from loadgen.result.model import Arm, PodShare, Result, TimeSeries

_MANY_PODS = 8
"""With more pods, single lines would form a tangle; a band from the lowest to the highest is drawn instead."""


def load_over_time(result: Result) -> Plot | None:
    """Draw requests in flight per pod over time; None if no arm has a series."""
    arms = [a for a in result.arms if a.summary.series and a.summary.series.in_flight]

    def values(series: TimeSeries) -> Mapping[str, Sequence[float | None]]:
        return series.in_flight

    told = "; ".join(f"{a.name}: imbalance {number(a.summary.imbalance)}" for a in arms)
    alt = f"Requests in flight per pod over time. Imbalance is the largest load divided by the mean. {told}."
    caption = f"{_how_drawn(arms, values)} If lines are far apart, some pods idle while others queue."
    return _over_time(
        result, arms, values, ("load", "Load per pod over time", caption, alt, "requests in flight"), False
    )


def hits_over_time(result: Result) -> Plot | None:
    """Draw the cached share per pod over time; None if no arm has a series."""
    arms = [
        a for a in result.arms if a.summary.series and any(_has(v) for v in a.summary.series.cached_token_rate.values())
    ]

    def values(series: TimeSeries) -> Mapping[str, Sequence[float | None]]:
        return series.cached_token_rate

    told = "; ".join(f"{a.name} {a.summary.reuse.cached_token_rate or 0:.1%} over the run" for a in arms)
    alt = f"Cached share of prompt tokens per pod over time. {told}."
    caption = f"{_how_drawn(arms, values)} A request counts at the time of its first token; a gap means no request."
    return _over_time(
        result,
        arms,
        values,
        ("hits", "Hit rate per pod over time", caption, alt, "cached share of prompt tokens"),
        True,
    )


def offered_load(result: Result) -> Plot | None:
    """Draw offered requests per second over time; None if not measured."""
    arms = [a for a in result.arms if a.summary.series and a.summary.series.request_rate]
    if not arms:
        return None
    slots, height = theme.slots(result), 190.0

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, height)
        for arm in arms:
            series = arm.summary.series
            assert series
            times, rates = _steps(series, series.request_rate)
            axes.plot(
                times, rates, color=theme.colour(slots[arm.name]), linewidth=1.4, linestyle=theme.dash(slots[arm.name])
            )
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        label_axes(axes, "seconds since the start", "offered requests per second")

    told = "; ".join(f"{a.name}: at most {max(a.summary.series.request_rate):.3g}/s" for a in arms if a.summary.series)
    caption = "What the generator offered, by intended send time."
    caption += " Paired arms have the same schedule." if result.contrasts else ""
    return Plot("offered", "Offered load", caption, f"Line chart. {told}.", paint, arm_keys(result, arms), height)


def _over_time(
    result: Result,
    arms: Sequence[Arm],
    values: Callable[[TimeSeries], Mapping[str, Sequence[float | None]]],
    words: tuple[str, str, str, str, str],
    share: bool,
) -> Plot | None:
    if not arms:
        return None
    slug, title, caption, alt, y_label = words
    named = [(arm.name, theme.slots(result)[arm.name]) for arm in arms]

    def paint(figure: FigureBase) -> None:
        panels = panel_axes(figure, named, y_label, "seconds since the start")
        for axes, arm, (_, slot) in zip(panels, arms, named, strict=True):
            assert arm.summary.series
            _draw_pods(axes, arm.summary.series, values(arm.summary.series), theme.colour(slot))
        panels[0].set_xlim(left=0)
        panels[0].xaxis.set_major_locator(MaxNLocator(4))
        if share:
            panels[0].set_ylim(0, 1.02)
            share_axis(panels[0].yaxis)
        else:
            panels[0].set_ylim(bottom=0)
            panels[0].yaxis.set_major_locator(MaxNLocator(4))

    return Plot(slug, title, caption, alt, paint, (), panels_height(len(arms)))


def _draw_pods(axes: Axes, series: TimeSeries, pods: Mapping[str, Sequence[float | None]], colour: str) -> None:
    lines = [_steps(series, pods[name]) for name in sorted(pods)]
    length = max(len(times) for times, _ in lines)
    table = np.full((len(lines), length), np.nan)
    for row, (_, values) in zip(table, lines, strict=True):
        row[: len(values)] = values
    times = (np.arange(length) + 0.5) * series.bucket_s
    seen = ~np.isnan(table).all(axis=0)
    if len(lines) <= _MANY_PODS:
        for row in table:
            axes.plot(times, row, color=colour, linewidth=0.9, alpha=0.55, marker="." if length < 3 else "")
    elif seen.any():
        low, high = np.nanmin(table[:, seen], axis=0), np.nanmax(table[:, seen], axis=0)
        axes.fill_between(times[seen], low, high, color=colour, alpha=0.22, linewidth=0)
    if len(lines) > 1 and seen.any():
        axes.plot(times[seen], np.nanmean(table[:, seen], axis=0), color=colour, linewidth=2)


def _steps(
    series: TimeSeries, values: Sequence[float | None]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    filled: npt.NDArray[np.float64] = np.array([np.nan if value is None else value for value in values], np.float64)
    times: npt.NDArray[np.float64] = (np.arange(len(filled), dtype=np.float64) + 0.5) * series.bucket_s
    return times, filled


def _how_drawn(arms: Sequence[Arm], values: Callable[[TimeSeries], Mapping[str, Sequence[float | None]]]) -> str:
    most = max((len(values(a.summary.series)) for a in arms if a.summary.series), default=0)
    if most <= 1:
        return "One pod."
    thin = "Thin: each pod." if most <= _MANY_PODS else "Band: from the lowest pod to the highest."
    return f"{thin} Thick: mean over the pods."


def _has(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def tokens_per_pod(result: Result) -> Plot | None:
    """Draw prompt tokens of each pod, prefilled and cached; None if no arm has a pod."""
    arms = [arm for arm in result.arms if any(pod.requests for pod in arm.summary.pods.values())]

    def draw(axes: Axes, pods: Sequence[PodShare], colour: str) -> None:
        at = range(1, len(pods) + 1)
        computed = [max(pod.prompt_tokens - pod.cached_tokens, 0) for pod in pods]
        axes.bar(at, computed, 0.8, color=colour)
        axes.bar(at, [pod.cached_tokens for pod in pods], 0.8, bottom=computed, color=colour, alpha=0.35)

    keys = (Key("prefilled", None, "fill"), Key("from cache", None, "pale"))
    told = "; ".join(
        f"{a.name}: {_spread([p.prompt_tokens - p.cached_tokens for p in a.summary.pods.values()])}" for a in arms
    )
    return _per_pod(
        result,
        arms,
        draw,
        ("pod-tokens", "Prompt tokens per pod", f"Prefilled tokens per pod: {told}."),
        "tokens",
        keys,
    )


def in_flight_per_pod(result: Result) -> Plot | None:
    """Draw mean and largest number of requests in flight on each pod; None if no arm has a pod."""
    arms = [arm for arm in result.arms if any(pod.requests for pod in arm.summary.pods.values())]

    def draw(axes: Axes, pods: Sequence[PodShare], colour: str) -> None:
        at = range(1, len(pods) + 1)
        axes.bar(at, [pod.mean_in_flight for pod in pods], 0.8, color=colour)
        axes.plot(at, [pod.max_in_flight for pod in pods], "_", color=theme.INK, markersize=120 / max(len(pods), 8))

    keys = (Key("mean", None, "fill"), Key("largest", None))
    told = "; ".join(f"{a.name}: {_spread([p.mean_in_flight for p in a.summary.pods.values()])}" for a in arms)
    alt = f"Mean requests in flight per pod: {told}."
    return _per_pod(result, arms, draw, ("pod-load", "Requests in flight per pod", alt), "requests in flight", keys)


def _per_pod(
    result: Result,
    arms: Sequence[Arm],
    draw: Callable[[Axes, Sequence[PodShare], str], None],
    words: tuple[str, str, str],
    y_label: str,
    keys: tuple[Key, ...],
) -> Plot | None:
    if not arms:
        return None
    slug, title, alt = words
    named = [(arm.name, theme.slots(result)[arm.name]) for arm in arms]
    most = max(len(arm.summary.pods) for arm in arms)

    def paint(figure: FigureBase) -> None:
        panels = panel_axes(figure, named, y_label, "pods, sorted by name")
        for axes, arm, (_, slot) in zip(panels, arms, named, strict=True):
            draw(axes, [arm.summary.pods[name] for name in sorted(arm.summary.pods)], theme.colour(slot))
            axes.grid(visible=False, axis="x")
            axes.margins(y=0.08)
        panels[0].set_xlim(0.3, most + 0.7)
        panels[0].set_ylim(bottom=0)
        panels[0].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panels[0].yaxis.set_major_locator(MaxNLocator(4))
        panels[0].yaxis.set_major_formatter(FuncFormatter(_compact))

    caption = "Pods by number; their names are in the table below."
    return Plot(slug, title, caption, alt, paint, keys, panels_height(len(arms)))


def _compact(value: float, _: float | None = None) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def _spread(values: Sequence[float]) -> str:
    show = count if max(values, default=0) >= 100 else number
    return f"{show(min(values))} to {show(max(values))}" if values else "no pod"
