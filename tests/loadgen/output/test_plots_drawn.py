"""Charts: which are drawn for which result, and the arithmetic of the axes."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from loadgen.output.plots.canvas import draw_png, draw_svg, log_range, log_ticks
from loadgen.output.plots.catalog import plots_of
from loadgen.output.plots.latency import block_points, contrast_forest, ratio_ticks, ttft_cdf, where_time_went
from loadgen.output.plots.sweep import knee, step_of
from loadgen.result.model import SweepPoint
from tests.loadgen.output import results

COMMON = {"ttft-cdf", "time-parts", "reuse", "load", "hits", "pod-tokens", "pod-load", "offered"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("comparison", COMMON | {"contrasts", "blocks"}),
        ("one_pod", COMMON | {"contrasts", "blocks"}),
        ("bench", COMMON),
        ("sweep", COMMON | {"sweep-goodput", "sweep-ttft"}),
        ("nothing_completed", set()),
        ("no_arms", set()),
    ],
)
def test_only_charts_with_something_to_show_are_drawn(name: str, expected: set[str]) -> None:
    plots = plots_of(results.named(name))
    assert {plot.slug for plot in plots} == expected
    assert len(plots) == len(expected)


def test_drawing_twice_gives_the_same_bytes() -> None:
    plot = plots_of(results.bench())[0]
    assert draw_svg(plot) == draw_svg(plot)


def test_png_is_an_image_with_room_for_title_and_legend() -> None:
    for plot in plots_of(results.odd_names())[:3]:
        image = Image.open(io.BytesIO(draw_png(plot)))
        assert image.format == "PNG"
        assert image.width > 1000
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


@pytest.mark.parametrize("name", ["bench", "comparison", "sweep"])
def test_nothing_is_cut_off_at_the_edge_of_an_image(name: str) -> None:
    for plot in plots_of(results.named(name)):
        image = Image.open(io.BytesIO(draw_png(plot))).convert("L")
        edges = [
            (0, 0, 1, image.height),
            (image.width - 1, 0, image.width, image.height),
            (0, 0, image.width, 1),
            (0, image.height - 1, image.width, image.height),
        ]
        assert [image.crop(edge).getextrema() for edge in edges] == [(255, 255)] * 4, plot.slug


def test_parts_of_the_time_add_up_to_the_mean_end_to_end() -> None:
    result = results.comparison()
    plot = where_time_went(result)
    figure = Figure()
    assert plot is not None
    plot.paint(figure)
    for row, arm in enumerate(result.arms):
        drawn: list[Any] = list(figure.axes[0].patches)
        bars = [bar for bar in drawn if abs(bar.get_y() + bar.get_height() / 2 - row) < 1e-6]
        ends = [0.0, *(bar.get_x() + bar.get_width() for bar in bars)]
        assert [bar.get_x() for bar in bars] == pytest.approx(ends[:-1])
        assert ends[-1] == pytest.approx(arm.summary.e2e.mean_ms)
        assert bars[1].get_width() == pytest.approx(arm.summary.ttft_from_send.mean_ms)


def test_blocks_stand_where_they_ran() -> None:
    result = results.comparison()
    places = [place for arm in result.arms for place, _ in block_points(result, arm)]
    assert sorted(places) == list(range(1, len(result.order) + 1))
    means = dict(block_points(result, result.arms[1]))
    second = [i for i, name in enumerate(result.order, 1) if name == result.arms[1].name]
    assert [means[i] for i in second] == [block.ttft.mean_ms for block in result.arms[1].blocks]


def last_of(points: list[SweepPoint]) -> float | None:
    found = knee(points)
    assert found is not None
    return step_of(found)


def test_knee_is_the_last_step_before_saturation() -> None:
    points = [p for p in results.sweep().sweep if p.arm == "round_robin"]
    assert last_of(points) == 8
    assert knee([p for p in points if not p.saturated]) is None
    assert knee([p for p in points if p.saturated]) is None
    assert last_of(list(reversed(points))) == 8


@given(st.floats(1e-3, 1e6), st.floats(1.4, 1e6))
def test_a_logarithmic_axis_has_ticks_inside_it_but_not_too_many(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks)
    assert all(low <= tick <= low * factor for tick in ticks)
    assert 1 <= len(ticks) <= 11


@given(st.lists(st.floats(0, 1e7), max_size=20))
def test_a_logarithmic_range_holds_every_positive_value(values: list[float]) -> None:
    low, high = log_range(values)
    assert 0 < low < high
    assert math.isfinite(high)
    assert all(low <= value <= high for value in values if value > 1e-300)


@given(st.floats(0.01, 0.8), st.floats(1.25, 100))
def test_ratio_axis_always_shows_one(low: float, high: float) -> None:
    ticks = ratio_ticks(low, high)
    assert 1.0 in ticks
    gaps = [math.log(b / a) for a, b in pairwise(ticks)]
    assert all(gap > 0 for gap in gaps)


def test_lines_of_the_distribution_are_the_results_quantiles() -> None:
    result = results.named("comparison")
    figure = Figure()
    plot = ttft_cdf(result)
    assert plot is not None
    plot.paint(figure)
    lines = figure.axes[0].lines
    assert len(lines) == len(result.arms)
    for line, arm in zip(lines, result.arms, strict=True):
        assert list(cast(Any, line.get_xdata())) == pytest.approx(arm.summary.ttft.cdf_ms)
        assert list(cast(Any, line.get_ydata())) == pytest.approx([i / 100 for i in range(101)])


def test_whiskers_of_the_forest_are_the_intervals() -> None:
    result = results.named("comparison")
    figure = Figure()
    plot = contrast_forest(result)
    assert plot is not None
    plot.paint(figure)
    drawn = [sorted(map(float, cast(Any, line.get_xdata()))) for line in figure.axes[0].lines]
    for contrast in result.contrasts:
        assert any(ends == pytest.approx([contrast.ratio.low, contrast.ratio.high]) for ends in drawn if len(ends) == 2)
        assert any(ends == pytest.approx([contrast.ratio.value]) for ends in drawn if len(ends) == 1)
