"""A chart and its two renderings: SVG with CSS variables as colours and with real text, and PNG on white."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from loadgen.output.style import theme
from loadgen.output.style.units import axis_time, clipped

WIDTH = 384.0
"""Width of an SVG in points: about one CSS pixel on a phone of 390 px, 1.45 on a page of 1,200 px in two columns."""
FONT = 10.5
PANEL_HEIGHT = 126.0
_DPI = 200
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": FONT,
    "text.color": theme.INK,
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": theme.SOFT,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": theme.LINE,
    "grid.linewidth": 0.7,
    "xtick.color": theme.SOFT,
    "ytick.color": theme.SOFT,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.labelcolor": theme.SOFT,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
}


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend; `slot` None: the colour of text."""

    label: str
    slot: int | None
    look: Literal["line", "dashed", "fill", "pale", "hatched", "dot", "hollow"] = "line"


@dataclass(frozen=True, slots=True)
class Plot:
    """The drawing, and what a reader needs to understand it."""

    slug: str
    title: str
    caption: str
    alt: str
    """The chart's message in words and numbers, for readers who cannot see it."""
    paint: Callable[[FigureBase], None]
    keys: tuple[Key, ...] = ()
    height: float = 236.0
    """Height in points."""


def draw_svg(plot: Plot) -> str:
    """Return an `<svg>` element without size, outside references or namespaces; its ids begin with the plot's slug."""
    with _painting({"svg.hashsalt": plot.slug}):
        figure = Figure(figsize=(WIDTH / 72, plot.height / 72), facecolor="none")
        plot.paint(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plot.slug}-", rest.replace("xlink:href=", "href="))
    return theme.to_css(f'<svg {box[0]} aria-hidden="true">{body}')


def draw_png(plot: Plot) -> bytes:
    """Return the chart with its title and its legend."""
    rows = math.ceil(len(plot.keys) / 2)
    head = 24.0 + rows * 15
    with _painting({}):
        figure = Figure(figsize=(WIDTH / 72, (plot.height + head) / 72), facecolor="white")
        title, chart = cast("list[SubFigure]", figure.subfigures(2, 1, height_ratios=[head, plot.height]))
        title.text(0.02, 1 - 6 / head, plot.title, va="top", weight="bold", size=FONT + 1)
        if plot.keys:
            title.legend(
                handles=[_handle(key) for key in plot.keys],
                loc="lower left",
                ncols=2,
                fontsize=FONT - 1,
                borderaxespad=0.2,
                columnspacing=1.2,
                labelspacing=0.2,
                bbox_to_anchor=(0.01, 0),
            )
        plot.paint(chart)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


@contextmanager
def _painting(further: dict[str, Any]) -> Iterator[None]:
    with matplotlib.rc_context(_STYLE | further), warnings.catch_warnings():  # type: ignore[arg-type]  # keys are literals
        # A browser has fonts for letters that DejaVu Sans lacks; a PNG shows a box, as the README says.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def _handle(key: Key) -> Line2D | Patch:
    colour = theme.INK if key.slot is None else theme.colour(key.slot)
    label = clipped(key.label, 28)
    match key.look:
        case "line":
            return Line2D([], [], color=colour, linestyle=theme.dash(key.slot or 0), label=label)
        case "dashed":
            return Line2D([], [], color=colour, linestyle="--", label=label)
        case "dot":
            return Line2D([], [], color=colour, marker="o", linestyle="none", label=label)
        case "hollow":
            return Line2D([], [], color=colour, marker="o", markerfacecolor="white", linestyle="none", label=label)
        case "hatched":
            return Patch(facecolor="none", edgecolor=colour, hatch="/////", label=label)
        case _:
            return Patch(facecolor=colour, alpha=0.35 if key.look == "pale" else 1.0, label=label)


def one_axes(figure: FigureBase, height: float, left: float = 48, bottom: float = 34, top: float = 20) -> Axes:
    """Return the only axes of a figure of `height` points; margins in points."""
    box = (left / WIDTH, bottom / height, 1 - (left + 18) / WIDTH, 1 - (bottom + top) / height)
    return figure.add_axes(box)


def panel_rows(panels: int) -> int:
    """Return the rows of a grid of one or two columns."""
    return 1 if panels == 1 else math.ceil(panels / 2)


def panels_height(panels: int) -> float:
    """Return the height in points of a figure with `panels` panels."""
    return 204.0 if panels == 1 else PANEL_HEIGHT * panel_rows(panels) + 22


def panel_axes(figure: FigureBase, names: Sequence[tuple[str, int]], y_label: str, x_label: str) -> list[Axes]:
    """Return one panel for each (arm, slot), in pairs with common y axes; the arm's name is the panel's title."""
    height, rows, columns = panels_height(len(names)), panel_rows(len(names)), min(2, len(names))
    axes: list[Axes] = []
    top, bottom, left, gap = 34.0, 32.0, 42.0, 16.0
    inner = (height - top - bottom - 30 * (rows - 1)) / rows
    width = (WIDTH - left - 10 - gap * (columns - 1)) / columns
    for i, (name, slot) in enumerate(names):
        row, column = divmod(i, columns)
        y0 = height - top - inner * (row + 1) - 30 * row
        box = ((left + column * (width + gap)) / WIDTH, y0 / height, width / WIDTH, inner / height)
        one = figure.add_axes(box, sharey=axes[0] if axes else None, sharex=axes[0] if axes else None)
        one.tick_params(labelleft=column == 0, labelbottom=i + columns >= len(names))
        one.set_title(
            clipped(name, 23 if columns == 2 else 50), loc="left", fontsize=FONT, color=theme.colour(slot), pad=4
        )
        axes.append(one)
    figure.text(4 / WIDTH, 1 - 4 / height, y_label, va="top", color=theme.SOFT, fontsize=FONT - 0.5)
    last = axes[-1].get_position()
    figure.text(last.x1, 4 / height, x_label, va="bottom", ha="right", color=theme.SOFT, fontsize=FONT - 0.5)
    return axes


def label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Put the x label below at the right and the y label above the axis, so that no text is turned sideways."""
    axes.set_xlabel(x_label, loc="right", labelpad=3)
    axes.annotate(y_label, (0, 1), (-42, 7), xycoords="axes fraction", textcoords="offset points", color=theme.SOFT)


def share_axis(axis: Any) -> None:
    """Show the ticks of a share from 0 to 1 in percent."""
    axis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def log_time_axis(axis: Any, low_ms: float, high_ms: float) -> None:
    """Give a logarithmic axis of milliseconds at least two ticks with numbers, whatever the range."""
    axis.set_major_locator(FixedLocator(log_ticks(low_ms, high_ms)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(axis_time))


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten over many decades, 1-2-5 over few, round steps within one."""
    decades = math.log10(high / low)
    if decades < 0.6:
        return [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    steps = (1, 2, 5) if decades < 1.7 else (1, 3) if decades < 2.6 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for e in exponents for step in steps if low <= (tick := step * 10.0**e) <= high]


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis around the positive `values`."""
    positive = np.asarray([value for value in values if value > 0])
    if not positive.size:
        return 1.0, 1000.0
    low, high = float(positive.min()), float(positive.max())
    return low / 1.12, max(high * 1.12, low * 1.5)
