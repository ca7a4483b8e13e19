"""Numbers as text, the same in every output; `MISSING` means not measured."""

from __future__ import annotations

from loadgen.result.model import Interval

MISSING = "–"
_ABBREVIATIONS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "e2el": "E2E", "jain": "Jain"}
_TAILS = {"ms": "ms", "s": "s"}
_SHARES = ("rate", "share")


def milliseconds(value: float | None) -> str:
    """Return three significant digits or whole milliseconds, without the unit."""
    if value is None:
        return MISSING
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def percent(value: float | None) -> str:
    """Return a share of 0 to 1 in percent, with one decimal place."""
    return MISSING if value is None else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """Return a whole number with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def number(value: float | None) -> str:
    """Return a number with two decimal places; whole from 1,000 on."""
    return MISSING if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def duration(seconds: float) -> str:
    """Return '42 s', '3 min 05 s' or '2 h 03 min'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02} min"


def axis_time(value_ms: float, _: float | None = None) -> str:
    """Return milliseconds with their unit for an axis: '250 ms', '1.5 s'."""
    return f"{value_ms / 1000:.4g} s" if abs(value_ms) >= 1000 else f"{value_ms:.3g} ms"


def clipped(name: str, width: int) -> str:
    """Return at most `width` characters: the middle is cut, because arms often differ only at the end."""
    name = printable(name)
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def printable(text: str) -> str:
    """Return `text` without control characters: a server's message must not control the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def metric_unit(metric: str) -> str:
    """Return 'ms', '%', '/s' or '' for a metric such as ttft_mean_ms, cached_token_rate, request_throughput."""
    last = metric.rsplit("_", 1)[-1]
    if last in _TAILS:
        return _TAILS[last]
    return "%" if last in _SHARES else "/s" if last in ("throughput", "goodput") else ""


def metric_label(metric: str) -> str:
    """Return a label: 'ttft_mean_ms' -> 'TTFT mean'."""
    words = metric.split("_")
    kept = words[:-1] if words[-1] in _TAILS and len(words) > 1 else words
    text = " ".join(_ABBREVIATIONS.get(word, word) for word in kept)
    return text[:1].upper() + text[1:]


def metric_value(metric: str, value: float | None, sign: bool = False) -> str:
    """Return a value of the metric with its unit; `sign` for differences."""
    if value is None:
        return MISSING
    unit = metric_unit(metric)
    text = f"{value * 100:,.1f}" if unit == "%" else milliseconds(value) if unit in ("ms", "s") else number(value)
    plus = "+" if sign and value > 0 else ""
    points = " points" if unit == "%" and sign else f" {unit}" if unit else ""
    return f"{plus}{text}{points}".replace(" /s", "/s")


def interval(metric: str, found: Interval) -> str:
    """Return a difference with its interval: '-210 ms [-260, -160]'; without an interval, no brackets."""
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
    """Return a ratio with its interval: '0.62x [0.55, 0.70]'."""
    value = f"{found.value:.2f}x"
    return value if found.low is None or found.high is None else f"{value} [{found.low:.2f}, {found.high:.2f}]"


def setting(value: str | int | float | bool | list[str] | None) -> str:
    """Return a setting as a user would type it."""
    if isinstance(value, list):
        return ",".join(value)
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
