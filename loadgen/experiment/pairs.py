"""The requests of all arms side by side: row i is the same turn of the same session and round in each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.experiment.bootstrap import MAX_UNITS
from loadgen.measure.columns import Columns, Floats, Run, columns_of
from loadgen.measure.goodput import good_requests

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Side:
    """One arm's part of the rows. nan: not measured. A row that the arm never sent is not completed."""

    completed: Bools
    attempted: Bools
    """Whether the arm sent some turn of the row's session."""
    good: Bools
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    """Prompt and cached tokens are 0 if usage was missing or the request failed."""
    block_completed: Floats
    """Completed requests per round."""
    block_duration_s: Floats


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows, and the units that are resampled: sessions, or groups of sessions if there are very many."""

    unit: Ints
    """The unit of each row."""
    round_of: Ints
    """The round of each unit, ascending."""
    sides: Mapping[str, Side]


def pair(rounds: Sequence[Mapping[str, Run]], objectives_ms: Mapping[str, float] | None = None) -> Pairs | None:
    """Pair every request that any arm sent; None: none was sent. Each of the `rounds` has a run of every arm."""
    arms = list(rounds[0])
    most_units = max(2, MAX_UNITS // len(rounds))
    units: list[Ints] = []
    round_of: list[Ints] = []
    parts: dict[str, list[Side]] = {arm: [] for arm in arms}
    for runs in rounds:
        keys = {arm: np.array(_keys(run)) for arm, run in runs.items()}
        rows = np.unique(np.concatenate(list(keys.values())))
        if not len(rows):
            continue
        sessions, session_of = np.unique(rows >> _TURN_BITS, return_inverse=True)
        groups = min(len(sessions), most_units)
        units.append(session_of % groups + sum(map(len, round_of)))
        round_of.append(np.full(groups, len(round_of)))
        for arm in arms:
            parts[arm].append(_side(runs[arm], keys[arm], rows, session_of, objectives_ms or {}))
    if not units:
        return None
    sides = {arm: _joined(parts[arm]) for arm in arms}
    return Pairs(np.concatenate(units), np.concatenate(round_of), sides)


_TURN_BITS = 20


def _keys(run: Run) -> Ints:
    """Return session and turn as one number."""
    sessions: Ints = run.records.session.astype(np.int64)
    return (sessions << _TURN_BITS) + run.records.turn


def _side(run: Run, keys: Ints, rows: Ints, session_of: Ints, objectives_ms: Mapping[str, float]) -> Side:
    columns = columns_of([run])
    at = np.searchsorted(rows, keys)
    attempted_sessions = np.zeros(int(session_of.max(initial=-1)) + 1, bool)
    attempted_sessions[session_of[at]] = True

    def placed(values: npt.NDArray[np.generic], empty: float) -> Floats:
        out = np.full(len(rows), empty)
        out[at] = values
        return out

    known = columns.completed & columns.has_usage
    return Side(
        completed=placed(columns.completed, 0).astype(bool),
        attempted=attempted_sessions[session_of],
        good=placed(good_requests(columns, objectives_ms), 0).astype(bool),
        ttft_s=placed(_where_completed(columns, columns.ttft_s), np.nan),
        tpot_s=placed(_where_completed(columns, columns.tpot_s), np.nan),
        e2e_s=placed(_where_completed(columns, columns.e2e_s), np.nan),
        prompt_tokens=placed(np.where(known, columns.prompt_tokens, 0), 0),
        cached_tokens=placed(np.where(known, columns.cached_tokens, 0), 0),
        block_completed=np.array([float(columns.completed.sum())]),
        block_duration_s=np.array([columns.duration_s]),
    )


def _where_completed(columns: Columns, values_s: Floats) -> Floats:
    return np.where(columns.completed, values_s, np.nan)


def _joined(sides: Sequence[Side]) -> Side:
    columns = (np.concatenate([getattr(side, name) for side in sides]) for name in Side.__slots__)
    return Side(*columns)
