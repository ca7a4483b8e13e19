"""Colours: one per arm in every chart and table, distinct for colour-blind readers too, in light and dark.

Charts are painted with the light colours. In HTML each becomes a CSS variable, so that a dark page has its own.
"""

from __future__ import annotations

from typing import Literal

from loadgen.result.model import Result

Dash = Literal["-", "--", ":", "-."]

# After Okabe & Ito's palette (https://jfly.uni-koeln.de/color/), darkened where a colour is too pale on white. Slot 0
# is the baseline's grey.
ARMS_LIGHT = ("#6b747c", "#0072b2", "#d08300", "#009e73", "#b8568c", "#c44a00", "#3a97cf", "#8a7f00")
ARMS_DARK = ("#a3adb6", "#56a9e8", "#f0b23c", "#2cc295", "#e69bc8", "#ff8a47", "#9ad8ff", "#d9cb4a")
INK, SOFT, LINE, PAPER = "#1d2329", "#59626a", "#e1e4e7", "#fffffe"
PAGE = {"ink": (INK, "#e8ebee"), "soft": (SOFT, "#a7b0b8"), "line": (LINE, "#343b42"), "paper": (PAPER, "#14181c")}
"""Name -> light, dark. Paper is not pure white, so that it can be found in the SVG by its value."""
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")


def arm_names(result: Result) -> list[str]:
    """Return all arms in order, including those of a sweep."""
    return list(dict.fromkeys([*(arm.name for arm in result.arms), *(point.arm for point in result.sweep)]))


def slots(result: Result) -> dict[str, int]:
    """Return arm -> slot: 0 for the baseline; the others count from 1, even beyond the palette's end."""
    others = [name for name in arm_names(result) if name != result.baseline]
    return {name: 0 if name == result.baseline else others.index(name) + 1 for name in arm_names(result)}


def slot_index(slot: int) -> int:
    """Return the entry of the palette: the eighth arm besides the baseline has the first one's colour again."""
    return 0 if slot == 0 else (slot - 1) % (len(ARMS_LIGHT) - 1) + 1


def colour(slot: int) -> str:
    """Return the light colour of a slot."""
    return ARMS_LIGHT[slot_index(slot)]


def dash(slot: int) -> Dash:
    """Return the line style that distinguishes arms with the same colour."""
    return DASHES[(max(slot, 1) - 1) // (len(ARMS_LIGHT) - 1) % len(DASHES)]


def css_variables() -> tuple[str, str]:
    """Return declarations for light and for dark pages."""
    light = {**{name: pair[0] for name, pair in PAGE.items()}, **{f"arm{i}": c for i, c in enumerate(ARMS_LIGHT)}}
    dark = {**{name: pair[1] for name, pair in PAGE.items()}, **{f"arm{i}": c for i, c in enumerate(ARMS_DARK)}}
    declared = ["".join(f"--{name}:{value};" for name, value in chosen.items()) for chosen in (light, dark)]
    return declared[0], declared[1]


def to_css(svg: str) -> str:
    """Return `svg` with each painted colour replaced by its CSS variable."""
    for i, value in enumerate(ARMS_LIGHT):
        svg = svg.replace(value, f"var(--arm{i})")
    for name, pair in PAGE.items():
        svg = svg.replace(pair[0], f"var(--{name})")
    return svg
