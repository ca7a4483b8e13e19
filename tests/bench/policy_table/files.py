"""`policies.json`, and the table for router/MEASURED.md."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from loadgen.simulate.arms import ARM_NAMES, PEERS
from tests.bench.policy_table.bounds import OURS, Bound, Table, against_one, best, half_width, mean, same_seeds
from tests.bench.policy_table.cases import Case
from tests.bench.policy_table.run import Cell


def save(table: Table, knees: Mapping[str, float], sessions: int, bounds: Sequence[Bound], path: Path) -> None:
    """Write everything: `<case>.<arm>.<number>` is a list over the seeds, null if there is no number. `sessions`:
    sessions per run; 0: the case's own number.
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
    """Return what `save` wrote: cells, knees, sessions. Raises OSError, and ValueError for any other content."""
    try:
        whole = json.loads(path.read_text())
        knees = {str(name): float(rate) for name, rate in whole.pop("knees_sessions_per_s").items()}
        sessions = int(whole.pop("sessions", 0))  # older files lack the number and are full tables
        whole.pop("bounds")
        table = {
            case: {
                arm: [_cell_of(dict(zip(numbers, row, strict=True))) for row in zip(*numbers.values(), strict=True)]
                for arm, numbers in arms.items()
            }
            for case, arms in whole.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a policy table: {type(error).__name__} {error}") from None
    return table, knees, sessions


def _storable(number: float) -> float | None:
    """Return the number, or None for NaN, which JSON lacks."""
    return None if math.isnan(number) else number


def _cell_of(numbers: dict[str, Any]) -> Cell:
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in numbers.items()}
    return Cell(**known)


def markdown(table: Table, cases: Sequence[Case]) -> Iterator[str]:
    """Yield the summary. Then yield for every case and arm the mean TTFT, with half the width of its 95 % interval over
    the seeds, and the other numbers.
    """
    yield from summary(table, cases)
    yield from gateways(table, cases)
    arms = [arm for arm in ARM_NAMES if any(arm in table.get(case.name, {}) for case in cases)]
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
    """Yield one line per case: `predicted_ttft`, the peer with the best mean TTFT, and the possible gain."""
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


def gateways(table: Table, cases: Sequence[Case]) -> Iterator[str]:
    """For pods that publish nothing, yield one line per number of gateways, compared with one gateway on equal
    seeds."""
    compared = [(case, both) for case in cases if (both := against_one(case, table)) is not None]
    if not compared:
        return
    yield "**predicted_ttft: several gateways and one**\n"
    yield (
        "| case | gateways | seeds | mean TTFT, ms | one's | mean / one's | p99 / one's | e2e / one's "
        "| hit rate, points more |"
    )
    yield "|---|" + "--:|" * 8
    for case, both in compared:
        ratios = []
        for field in ("mean_ttft_ms", "p99_ttft_ms", "mean_e2e_ms"):
            ratio, chance = both.ratio(field)
            ratios.append(f"{ratio:.3f}" if math.isnan(chance) else f"{ratio:.3f} ± {chance:.3f}")
        numbers = [
            str(case.gateways),
            str(len(both.several)),
            f"{mean(both.several, 'mean_ttft_ms'):,.1f}",
            f"{mean(both.one, 'mean_ttft_ms'):,.1f}",
            *ratios,
            f"{-100 * both.lag:+.2f}",
        ]
        yield f"| {case.name.rpartition('_')[0]} | " + " | ".join(numbers) + " |"
    yield ""


def bound_lines(bounds: Sequence[Bound]) -> Iterator[str]:
    """Yield one line per bound."""
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
