"""Numbers as text, the same in every output; `MISSING` stands where nothing was measured."""

from __future__ import annotations

from loadgen.result.model import Interval

MISSING = "–"
_ABBREVIATIONS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "e2el": "E2E", "jain": "Jain"}
_TAILS = {"ms": "ms", "s": "s"}
_SHARES = ("rate", "share")


def milliseconds(value: float | None) -> str:
    """Three significant digits or whole milliseconds, without the unit."""
    if value is None:
        return MISSING
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def percent(value: float | None) -> str:
    """A share of 0 to 1 in percent, one decimal place below 99.95 %."""
    return MISSING if value is None else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return MISSING if value is None else f"{value:,.0f}"


def number(value: float | None) -> str:
    """Two decimal places; whole from 1,000 on."""
    return MISSING if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def duration(seconds: float) -> str:
    """'42 s', '3 min 05 s' or '2 h 03 min'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02} min"


def axis_time(value_ms: float, _: float | None = None) -> str:
    """Milliseconds with their unit for an axis: '250 ms', '1.5 s'."""
    return f"{value_ms / 1000:.4g} s" if abs(value_ms) >= 1000 else f"{value_ms:.3g} ms"


def clipped(name: str, width: int) -> str:
    """At most `width` characters: the middle gives way, since arms often differ only at the end."""
    name = printable(name)
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def printable(text: str) -> str:
    """`text` without control characters: what a server says of a failure must not steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def metric_unit(metric: str) -> str:
    """'ms', '%', '/s' or '' for a metric's name such as ttft_mean_ms, cached_token_rate, request_throughput."""
    last = metric.rsplit("_", 1)[-1]
    if last in _TAILS:
        return _TAILS[last]
    return "%" if last in _SHARES else "/s" if last in ("throughput", "goodput") else ""


def metric_label(metric: str) -> str:
    """'ttft_mean_ms' -> 'TTFT mean'."""
    words = metric.split("_")
    kept = words[:-1] if words[-1] in _TAILS and len(words) > 1 else words
    text = " ".join(_ABBREVIATIONS.get(word, word) for word in kept)
    return text[:1].upper() + text[1:]


def metric_value(metric: str, value: float | None, sign: bool = False) -> str:
    """A value of the metric with its unit; `sign` for differences."""
    if value is None:
        return MISSING
    unit = metric_unit(metric)
    text = f"{value * 100:,.1f}" if unit == "%" else milliseconds(value) if unit in ("ms", "s") else number(value)
    plus = "+" if sign and value > 0 else ""
    points = " points" if unit == "%" and sign else f" {unit}" if unit else ""
    return f"{plus}{text}{points}".replace(" /s", "/s")


def interval(metric: str, found: Interval) -> str:
    """A difference with its interval: '-210 ms [-260, -160]'; no brackets where there is none."""
    value = metric_value(metric, found.value, sign=True)
    if found.low is None or found.high is None:
        return value
    unit = metric_unit(metric)
    low, high = (
        metric_value(metric, end, sign=True).removesuffix(" points").removesuffix(f" {unit}").removesuffix(unit)
        if unit
        else metric_value(metric, end, sign=True)
        for end in (found.low, found.high)
    )
    return f"{value} [{low}, {high}]"


def ratio(found: Interval) -> str:
    """A ratio with its interval: '0.62x [0.55, 0.70]'."""
    value = f"{found.value:.2f}x"
    return value if found.low is None or found.high is None else f"{value} [{found.low:.2f}, {found.high:.2f}]"


def setting(value: str | int | float | bool | list[str] | None) -> str:
    """A setting as it would be typed."""
    if isinstance(value, list):
        return ",".join(value)
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
