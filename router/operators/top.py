"""`warmroute-gateway top`: the live page in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.contract.bounded_json import loads

DEFAULT_URL = "http://127.0.0.1:8081"
HEARD_S = 10.0
"""A gateway that sends nothing for this long is gone: a live one sends a frame a second."""
SHOWN_PODS = 24
SHOWN_PREFIXES = 6
SHOWN_DECISIONS = 10
_HINT = "--admin-url must be the URL of the gateway's --admin-port"
_BROKEN = (OSError, http.client.HTTPException)
"""Errors of a connection that breaks, or of a server that does not speak HTTP."""
_STATE = frozenset(("decisions", "pods", "prefixes", "uptime_s", "waiting"))
_WHOLE = _STATE | {"about", "history"}
_BAR = 12
_WIDE = 100
"""From this many columns on, everything has room."""


class CannotWatch(Exception):
    """The gateway cannot be watched; the text says why, and what to do."""


def top_command(arguments: Sequence[str]) -> int:
    """Show the gateway until interrupted, and return the exit status: 0, or 1 if it cannot be watched."""
    parser = argparse.ArgumentParser(
        "warmroute-gateway top", description="a gateway's pods, load, hits and decisions, once a second, until Ctrl-C"
    )
    parser.add_argument(
        "--admin-url", default=DEFAULT_URL, metavar="URL", help="URL of a gateway's --admin-port (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print the present state, and exit")
    chosen = parser.parse_args(arguments)
    console = Console()
    try:
        if chosen.once:
            console.print(screen(_whole(chosen.admin_url), console.width))
            return 0
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            for state in frames(chosen.admin_url):
                live.update(screen(state, console.width), refresh=True)
    except CannotWatch as error:
        print(f"warmroute-gateway top: {error}", file=sys.stderr)
        return 1
    return 0


def _opened(url: str, path: str) -> Any:
    try:
        return urllib.request.urlopen(url.rstrip("/") + path, timeout=HEARD_S)
    except urllib.error.HTTPError as error:
        with error:
            raise CannotWatch(_refusal(url, error)) from None
    except (*_BROKEN, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CannotWatch(f"{url}: {reason}; {_HINT}") from None


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = str(loads(error.read(4096))["error"]["message"])
        return f"{url}: {message}" if error.code != 404 else f"{url} has no live page; {_HINT}"
    return f"{url} answers {error.code}; {_HINT}"


def _whole(url: str) -> dict[str, Any]:
    with _opened(url, "/ui/state") as answer:
        try:
            text = answer.read()
        except _BROKEN as error:
            raise CannotWatch(f"{url}: not a gateway's answer: {error}") from None
    state = _read(url, text, _WHOLE)
    return state | {"point": _last_point(state)}


def _read(url: str, text: bytes, names: frozenset[str]) -> dict[str, Any]:
    """Return a gateway's state, which has at least these `names`. Raises CannotWatch."""
    try:
        state: Any = loads(text)
    except (ValueError, RecursionError) as error:
        raise CannotWatch(f"{url}: not a gateway's answer: {error}") from None
    if not isinstance(state, dict) or not names <= state.keys():
        raise CannotWatch(f"{url}: not a gateway's answer; {_HINT}")
    return state


def frames(url: str) -> Iterator[dict[str, Any]]:
    """Yield the gateway's whole state, once a second. Raises CannotWatch."""
    about: Any = {}
    decisions: list[Any] = []
    with _opened(url, "/ui/events") as stream:
        while True:
            try:
                line = stream.readline()
            except _BROKEN as error:
                raise CannotWatch(f"{url}: {error}") from None
            if not line:
                raise CannotWatch(f"{url}: the gateway has ended the stream")
            if not line.startswith(b"data:"):
                continue
            state = _read(url, line[5:], _STATE if about else _WHOLE)
            if "history" in state:  # the whole state
                about, state, decisions = state["about"], state | {"point": _last_point(state)}, []
            decisions = [*decisions, *state["decisions"]][-SHOWN_DECISIONS:]
            yield state | {"about": about, "decisions": decisions}


def _last_point(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[-1] if values else None for name, values in state["history"].items()}


def screen(state: Mapping[str, Any], width: int) -> Group:
    """Return one state drawn for a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(state), _pods(state, width)]
    if state["prefixes"]:
        parts.append(_prefixes(state))
    if state["decisions"]:
        parts.append(_decisions(state))
    if state["waiting"]["tenants"]:
        waiting = ", ".join(f"{name} {count}" for name, count in state["waiting"]["tenants"].items())
        parts.append(Text(f"waiting  {waiting}"))
    return Group(*parts)


def _head(state: Mapping[str, Any]) -> Text:
    point, about = state["point"], state["about"]
    serving, known = state["pods"]["states"].get("serving", 0), sum(state["pods"]["states"].values())
    text = Text()
    text.append("warmroute ", "bold")
    text.append(
        f"{about['name']}  {about['policy']}  up {state['uptime_s']:.0f} s  {serving} of {known} pods serve\n", "dim"
    )
    text.append(f"{_rate(point['answers_per_s'])}/s", "bold")
    if point["errors_per_s"]:
        text.append(f"  {_rate(point['errors_per_s'])}/s fail", "bold red")
    text.append(f"   hits {_percent(point['hit_rate'])} (expected {_percent(point['expected_hit_rate'])})")
    text.append(f"   first byte p50 {_time(point['first_byte_p50_s'])}, p95 {_time(point['first_byte_p95_s'])}")
    text.append(f"   in flight {_count(point['in_flight'])}   waiting {_count(point['waiting'])}\n")
    return text


def _pods(state: Mapping[str, Any], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("answers/s", "in flight", "queue", "KV used", "decoding", "tokens/s")[: 6 if width >= _WIDE else 4]
    table.add_column("pod", no_wrap=True, min_width=12)
    table.add_column("state", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(state["pods"]["rows"], key=lambda row: (row["state"] == "serving", -row.get("in_flight", 0)))
    for row in sorted(rows[:SHOWN_PODS], key=lambda row: row["pod"] or row["url"]):
        colour = "green" if row["state"] == "serving" else "red"
        cells = [Text(row["pod"] or row["url"]), Text(row["state"], colour)]
        if "in_flight" in row:
            cells += [
                Text(text)
                for text in (
                    _rate(row["per_s"]),
                    _count(row["in_flight"]),
                    _time(row["queue_s"]),
                    _bar(row["kv_used"]) if width >= _WIDE else _percent(row["kv_used"]),
                    _count(row["decoding"]),
                    _count(row["tokens_per_s"]),
                )[: len(names)]
            ]
        table.add_row(*cells)
    known = sum(state["pods"]["states"].values())
    if known > len(table.rows):
        table.add_row(Text(f"and {known - len(table.rows)} more", "dim"))
    return table


def _prefixes(state: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("hottest prefixes", "requests", "tokens", "pods"):
        table.add_column(name, justify="left" if name in ("hottest prefixes", "pods") else "right")
    for prefix in state["prefixes"][:SHOWN_PREFIXES]:
        more = f" and {prefix['held_by'] - len(prefix['holders'])} more"
        held = ", ".join(prefix["holders"]) + (more if prefix["held_by"] > len(prefix["holders"]) else "")
        table.add_row(prefix["key"][:8], _percent(prefix["share"]), _count(prefix["tokens"]), Text(held or "none"))
    return table


def _decisions(state: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("decisions", no_wrap=True, min_width=12)
    for name in ("prompt", "cached", "expected", "first byte", "predicted", "status"):
        table.add_column(name, justify="right", no_wrap=True)
    for decided in reversed(state["decisions"][-SHOWN_DECISIONS:]):
        table.add_row(
            Text(decided["pod"]),
            _count(decided["prompt_tokens"]),
            _count(decided["cached_tokens"]),
            _count(decided["expected_cached_tokens"]),
            _time(decided["first_byte_s"]),
            _time(decided["expected_ttft_s"]),
            Text(str(decided["status"]), "red" if decided["status"] >= 500 else ""),
        )
    return table


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value:.0f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 10 else _count(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{1000 * seconds:.1f} ms"
        if seconds < 0.01
        else f"{1000 * seconds:.0f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def _bar(share: float) -> str:
    filled = round(_BAR * min(1.0, max(0.0, share)))
    return "█" * filled + "░" * (_BAR - filled) + f" {100 * share:3.0f} %"
