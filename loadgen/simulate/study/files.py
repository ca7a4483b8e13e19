"""`policies.json` and the table for the README."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from loadgen.simulate.arms import ARM_NAMES, PEERS, TRIAL_NAMES
from loadgen.simulate.study.bounds import OURS, Bound, Table, best, half_width, mean, same_seeds
from loadgen.simulate.study.cases import Case
from loadgen.simulate.study.run import Cell


def save(table: Table, knees: Mapping[str, float], sessions: int, bounds: Sequence[Bound], path: Path) -> None:
    """Write everything: `<case>.<arm>.<number>` is a list over the seeds, null where there is no number. `sessions` of
    each run; 0: the case's own.
    """
    found = {
        case: {
            arm: {field.name: [_storable(getattr(cell, field.name)) for cell in cells] for field in fields(Cell)}
            for arm, cells in arms.items()
        }
        for case, arms in table.items()
    }
    checked = [{**asdict(bound), "value": _storable(bound.value), "kept": bound.kept} for bound in bounds]
    whole = {**found, "knees_sessions_per_s": dict(knees), "sessions": sessions, "bounds": checked}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    os.replace(draft, path)


def load(path: Path) -> tuple[dict[str, dict[str, list[Cell]]], dict[str, float], int]:
    """What `save` wrote: cells, knees, sessions. Raises OSError, and ValueError where it wrote something else."""
    try:
        whole = json.loads(path.read_text())
        knees = {str(name): float(rate) for name, rate in whole.pop("knees_sessions_per_s").items()}
        sessions = int(whole.pop("sessions", 0))  # files from before it was kept are whole tables
        whole.pop("bounds")
        table = {
            case: {
                arm: [_cell_of(dict(zip(numbers, row, strict=True))) for row in zip(*numbers.values(), strict=True)]
                for arm, numbers in arms.items()
            }
            for case, arms in whole.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no policy table: {type(error).__name__} {error}") from None
    return table, knees, sessions


def _storable(number: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(number) else number


def _cell_of(numbers: dict[str, Any]) -> Cell:
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in numbers.items()}
    return Cell(**known)


def markdown(table: Table, cases: Sequence[Case]) -> Iterator[str]:
    """The summary; then of every arm on every case mean TTFT, with the half width of its 95 % interval over the seeds,
    and the rest.
    """
    yield from summary(table, cases)
    arms = [arm for arm in (*ARM_NAMES, *TRIAL_NAMES) if any(arm in table.get(case.name, {}) for case in cases)]
    rows = [case for case in cases if case.name in table]
    for title, field, digits in (
        ("Mean TTFT, ms", "mean_ttft_ms", 0),
        ("Mean TTFT without queueing, ms", "unqueued_ttft_ms", 0),
        ("p99 TTFT, ms", "p99_ttft_ms", 0),
        ("Mean end-to-end time, ms", "mean_e2e_ms", 0),
        ("Mean time per output token, ms", "mean_tpot_ms", 1),
        ("Cached share of prompt tokens", "hit_rate", 3),
        ("Requests of the fullest pod / mean", "max_over_mean_load", 2),
    ):
        yield f"**{title}**\n"
        yield "| router | " + " | ".join(case.name for case in rows) + " |"
        yield "|---" * (len(rows) + 1) + "|"
        for arm in arms:
            cells = [_cell(table[case.name].get(arm), field, digits) for case in rows]
            yield f"| {arm} | " + " | ".join(cells) + " |"
        yield ""
    seeds = {f"{arm} on {case.name}": len(table[case.name][arm]) for case in rows for arm in table[case.name]}
    most = max(seeds.values(), default=0)
    if fewer := [f"{what} {count}" for what, count in seeds.items() if count < most]:
        yield f"Seeds: {most}, but {', '.join(fewer)}. Arms are compared over the seeds that all of them have.\n"


def summary(table: Table, cases: Sequence[Case]) -> Iterator[str]:
    """One line a case: `predicted_ttft` beside the peer with the best mean TTFT, and what there is to win."""
    yield "**predicted_ttft and the best peer, TTFT in ms**\n"
    yield (
        "| case | round_robin | best peer | its mean | its p99 | predicted_ttft | p99 | mean / peer's "
        "| without queueing | omniscient | hit rate | prefix_hash | affinity_groups | its max / mean load |"
    )
    yield "|---|--:|---|" + "--:|" * 11
    for case in cases:
        arms = table.get(case.name, {})
        peers = same_seeds(arms, (OURS, *PEERS))
        ours = peers.pop(OURS, ())
        if not ours or not peers:
            continue
        peer, theirs = best(peers, "mean_ttft_ms")
        numbers = [
            _cell(arms.get("round_robin"), "mean_ttft_ms", 0),
            peer,
            _cell(peers[peer], "mean_ttft_ms", 1),
            _cell(peers[peer], "p99_ttft_ms", 0),
            _cell(ours, "mean_ttft_ms", 1),
            _cell(ours, "p99_ttft_ms", 0),
            f"{mean(ours, 'mean_ttft_ms') / theirs:.2f}",
            f"{mean(ours, 'unqueued_ttft_ms'):,.1f}",
            _cell(arms.get("omniscient"), "mean_ttft_ms", 1),
            _cell(ours, "hit_rate", 3),
            _cell(arms.get("prefix_hash"), "hit_rate", 3),
            _cell(arms.get("affinity_groups"), "hit_rate", 3),
            _cell(arms.get("affinity_groups"), "max_over_mean_load", 2),
        ]
        yield f"| {case.name} | " + " | ".join(numbers) + " |"
    yield ""


def bound_lines(bounds: Sequence[Bound]) -> Iterator[str]:
    """One line a bound."""
    for bound in bounds:
        mark = "kept  " if bound.kept else "MISSED"
        yield f"{mark} {bound.name}: {bound.value:.3f}, at most {bound.limit:.3f} ({bound.detail})"


def _cell(cells: Sequence[Cell] | None, field: str, digits: int) -> str:
    numbers = [getattr(cell, field) for cell in cells or ()]
    if not numbers or any(map(math.isnan, numbers)):
        return "-"
    value = f"{statistics.fmean(numbers):,.{digits}f}"
    if len(numbers) < 2 or not field.endswith("_ms") or field == "unqueued_ttft_ms":
        return value
    return f"{value} ± {half_width(numbers):,.{digits}f}"
