"""Charts of a sweep: served load against offered load, and TTFT up to the knee."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator

from loadgen.output.plots.canvas import Key, Plot, label_axes, log_range, log_time_axis, one_axes
from loadgen.output.style import theme
from loadgen.output.style.units import metric_label, milliseconds, number
from loadgen.result.model import Result, SweepPoint

_DOTTED = " Dotted: the offered load. Rates include the time of a step's last answers, so they are low in short steps."
_HEIGHT = 236.0


def step_of(point: SweepPoint) -> float:
    """Return the place of a point on the x axis."""
    return float(point.rate if point.rate is not None else point.concurrency or 0)


def served(point: SweepPoint) -> float:
    """Return requests per second that met every objective; all completed requests if there is no objective."""
    s = point.summary
    return s.goodput.request_goodput if s.goodput else s.request_throughput


def knee(points: Sequence[SweepPoint]) -> SweepPoint | None:
    """Return the highest step before the first saturated one; None if the lowest step is saturated, or if no step
    is."""
    ordered = sorted(points, key=step_of)
    before = [p for i, p in enumerate(ordered) if not any(q.saturated for q in ordered[: i + 1])]
    return before[-1] if before and len(before) < len(ordered) else None


def sweep_goodput(result: Result) -> Plot | None:
    """Draw goodput (or throughput) against the offered load; None without a sweep."""
    arms = _by_arm(result)
    if not arms:
        return None
    slots = theme.slots(result)
    has_objectives = any(point.summary.goodput for points in arms.values() for point in points)
    by_rate = all(point.rate is not None for points in arms.values() for point in points)

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, _HEIGHT)
        for name, points in arms.items():
            _line(axes, points, [served(p) for p in points], slots[name], "-")
            found = knee(points)
            if found:
                axes.annotate(
                    f"knee {step_of(found):g}",
                    (step_of(found), served(found)),
                    (0, 7),
                    textcoords="offset points",
                    ha="center",
                    color=theme.colour(slots[name]),
                    fontsize=9.5,
                    bbox={"fc": theme.PAPER, "ec": "none", "pad": 0.5},
                )
        if by_rate:
            end = max(step_of(p) for points in arms.values() for p in points)
            axes.plot([0, end], [0, end], color=theme.SOFT, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.set_ylim(bottom=0)
        _x_axis(axes, arms, by_rate)
        label_axes(axes, _x_label(by_rate), "good requests per second" if has_objectives else "requests per second")

    what = "Goodput" if has_objectives else "Throughput"
    told = "; ".join(
        f"{name}: at most {number(max(served(p) for p in points))}/s"
        + (f", knee at {step_of(found):g}" if (found := knee(points)) else "")
        for name, points in arms.items()
    )
    caption = "Hollow: saturated." + (_DOTTED if by_rate else "")
    caption += f" Good: {_objectives(arms)}." if has_objectives else ""
    keys = (*_keys(result, arms), Key("saturated", None, "hollow"))
    return Plot("sweep-goodput", f"{what} against load", caption, f"{what} by step. {told}.", paint, keys, _HEIGHT)


def sweep_ttft(result: Result) -> Plot | None:
    """Draw TTFT median and p99 against the offered load; None if nothing completed."""
    arms = {
        name: done
        for name, points in _by_arm(result).items()
        if (done := [p for p in points if p.summary.ttft.median_ms])
    }
    if not arms:
        return None
    slots = theme.slots(result)
    by_rate = all(point.rate is not None for points in arms.values() for point in points)
    objective = next(
        (g.objectives_ms.get("ttft") for ps in arms.values() for p in ps if (g := p.summary.goodput)), None
    )

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, _HEIGHT)
        values: list[float] = [objective * 1.25] if objective else []
        for name, points in arms.items():
            for style, wanted in (("-", "median_ms"), ("--", "p99_ms")):
                heights = [getattr(p.summary.ttft, wanted) or p.summary.ttft.median_ms or 0.0 for p in points]
                values += heights
                _line(axes, points, heights, slots[name], style)
        axes.set_yscale("log")
        low, high = log_range(values)
        axes.set_ylim(low, high)
        log_time_axis(axes.yaxis, low, high)
        if objective:
            axes.axhline(objective, color=theme.INK, linewidth=1)
            axes.annotate(
                "objective",
                (1, objective),
                (0, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                fontsize=9.5,
            )
        _x_axis(axes, arms, by_rate)
        label_axes(axes, _x_label(by_rate), "time to first token, log scale")

    told = "; ".join(
        f"{name}: {', '.join(f'{step_of(p):g} -> {milliseconds(p.summary.ttft.median_ms)} ms' for p in points)}"
        for name, points in arms.items()
    )
    keys = (*_keys(result, arms), Key("dashed: p99", None, "dashed"))
    caption = "Solid: median. Dashed: 99th percentile. Hollow: saturated. Completed requests."
    return Plot("sweep-ttft", "Time to first token against load", caption, f"Medians. {told}.", paint, keys, _HEIGHT)


def _by_arm(result: Result) -> dict[str, list[SweepPoint]]:
    names = dict.fromkeys(point.arm for point in result.sweep)
    return {name: sorted((p for p in result.sweep if p.arm == name), key=step_of) for name in names}


def _line(axes: Axes, points: Sequence[SweepPoint], heights: Sequence[float], slot: int, style: str) -> None:
    colour, x = theme.colour(slot), [step_of(p) for p in points]
    axes.plot(x, heights, color=colour, linewidth=1.6, linestyle=style)
    for hollow, face in ((False, colour), (True, theme.PAPER)):
        chosen = [i for i, p in enumerate(points) if p.saturated == hollow]
        axes.plot(
            [x[i] for i in chosen], [heights[i] for i in chosen], "o", color=colour, markersize=5, markerfacecolor=face
        )


def _x_axis(axes: Axes, arms: dict[str, list[SweepPoint]], by_rate: bool) -> None:
    axes.set_xlim(0, max(step_of(p) for points in arms.values() for p in points) * 1.06 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=not by_rate))
    axes.grid(visible=False, axis="x")


def _x_label(by_rate: bool) -> str:
    return "offered requests per second" if by_rate else "sessions at a time"


def _keys(result: Result, arms: dict[str, list[SweepPoint]]) -> tuple[Key, ...]:
    slots = theme.slots(result)
    return tuple(Key(name, slots[name]) for name in arms)


def _objectives(arms: dict[str, list[SweepPoint]]) -> str:
    found = next((g for points in arms.values() for p in points if (g := p.summary.goodput)), None)
    return (
        ", ".join(f"{metric_label(name)} within {value:g} ms" for name, value in found.objectives_ms.items())
        if found
        else ""
    )
