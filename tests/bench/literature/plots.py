"""Charts of the tables: throughput by sharing level, TTFT by workload."""

from __future__ import annotations

from matplotlib.figure import FigureBase

from loadgen.output.plots.canvas import Key, Plot, label_axes, log_range, log_time_axis, one_axes, share_axis
from loadgen.output.style import theme
from tests.bench.literature.cases import KINDS, SHARING_LEVELS, WORKLOAD_ARMS
from tests.bench.literature.run import Tables

_HEIGHT = 236.0
KEYS = tuple(Key(arm, slot) for slot, arm in enumerate(WORKLOAD_ARMS))


def charts(tables: Tables) -> tuple[Plot, Plot]:
    """Return the charts in reading order."""
    return _throughput(tables), _ttft(tables)


def _throughput(tables: Tables) -> Plot:
    by_name = {(row.case, row.arm): row.mean("throughput") for row in tables.sharing}
    lines = {arm: [by_name[f"{level:g}", arm] for level in SHARING_LEVELS] for arm in WORKLOAD_ARMS}

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, _HEIGHT)
        for slot, heights in enumerate(lines.values()):
            axes.plot(SHARING_LEVELS, heights, color=theme.colour(slot), marker="o", markersize=3, linewidth=1.6)
        axes.set_ylim(bottom=0)
        share_axis(axes.xaxis)
        label_axes(axes, "shared part of a prompt", "requests per second")

    told = "; ".join(f"{arm}: {', '.join(f'{value:.0f}' for value in values)}" for arm, values in lines.items())
    alt = f"At {', '.join(f'{level:.0%}' for level in SHARING_LEVELS)} shared, requests per second: {told}."
    return Plot("sharing", "Throughput by sharing level", "Mean over the seeds.", alt, paint, KEYS, _HEIGHT)


def _ttft(tables: Tables) -> Plot:
    by_name = {(row.case, row.arm): row.mean("mean_ttft_ms") for row in tables.workloads}
    names = [kind.name for kind in KINDS]

    def paint(figure: FigureBase) -> None:
        axes = one_axes(figure, _HEIGHT, left=150)
        for slot, arm in enumerate(WORKLOAD_ARMS):
            values = [by_name[name, arm] for name in names]
            axes.plot(values, range(len(names)), "o", color=theme.colour(slot), markersize=5)
        low, high = log_range(list(by_name.values()))
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        log_time_axis(axes.xaxis, low, high)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("mean time to first token, log scale", loc="right", labelpad=3)

    told = "; ".join(
        f"{name}: {', '.join(f'{arm} {by_name[name, arm]:.0f} ms' for arm in WORKLOAD_ARMS)}" for name in names
    )
    return Plot("workloads", "Mean TTFT by workload", "Mean over the seeds.", f"{told}.", paint, KEYS, _HEIGHT)
