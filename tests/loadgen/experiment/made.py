"""Rounds of arms whose requests are drawn from a known distribution."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loadgen.experiment.contrasts import Contrasts, contrasts
from loadgen.experiment.pairs import Pairs, Side, pair
from loadgen.experiment.verdict import able_arms
from loadgen.measure.records import RequestRecord
from loadgen.measure.summary import summarise_runs
from loadgen.result.model import Arm
from tests.loadgen.measure.builders import MadeRun, failed, made_run, request

Rounds = list[dict[str, MadeRun]]
BASE = "round_robin"


def rounds_of(
    factors: Mapping[str, float],
    *,
    rounds: int = 2,
    sessions: int = 30,
    noise: float = 0.0,
    round_noise: float = 0.0,
    failing: Mapping[str, float] | None = None,
    seed: int = 1,
    **fields: object,
) -> Rounds:
    """Return sessions of two turns. Each turn has a base TTFT, equal in all arms. It is multiplied by the arm's factor
    and by lognormal noise of the request and of the block. `failing` arms fail a share of their first turns."""
    rng = np.random.default_rng(seed)
    out: Rounds = []
    for _ in range(rounds):
        ttfts_s = np.exp(rng.normal(-1.5, 0.7, (sessions, 1)) + rng.normal(0, 0.3, (sessions, 2)))
        runs = {}
        for arm, factor in factors.items():
            drawn_s = ttfts_s * factor * np.exp(rng.normal(0, round_noise) + rng.normal(0, noise, ttfts_s.shape))
            broken = rng.random(sessions) < (failing or {}).get(arm, 0.0)
            runs[arm] = made_run([r for s in range(sessions) for r in _session(s, drawn_s[s], broken[s], fields)])
        out.append(runs)
    return out


def _session(number: int, ttfts_s: np.ndarray, is_broken: bool, fields: Mapping[str, object]) -> list[RequestRecord]:
    start_s = number * 0.5
    if is_broken:
        return [failed(number, 0, start_s)]
    return [request(number, turn, float(ttft_s), start_s + turn, **fields) for turn, ttft_s in enumerate(ttfts_s)]


def drawn_pairs(factor: float, *, rounds: int, sessions: int, noise: float, round_noise: float, seed: int) -> Pairs:
    """Draw pairs of BASE and "arm" from the same distribution. It makes no records, so hundreds of trials are fast."""
    rng = np.random.default_rng(seed)
    rows = rounds * sessions * 2
    unit = np.repeat(np.arange(rounds * sessions), 2)
    ttft_s = np.repeat(np.exp(rng.normal(-1.5, 0.7, rounds * sessions)), 2) * np.exp(rng.normal(0, 0.3, rows))
    yes, none = np.ones(rows, bool), np.zeros(rows)
    sides = {}
    for arm, times in ((BASE, 1.0), ("arm", factor)):
        block = np.repeat(rng.normal(0, round_noise, rounds), sessions * 2)
        drawn_s = ttft_s * times * np.exp(block + rng.normal(0, noise, rows))
        sides[arm] = Side(yes, yes, yes, drawn_s, none, drawn_s, none, none, np.ones(rounds), np.ones(rounds))
    return Pairs(unit, np.repeat(np.arange(rounds), sessions), sides)


def found_in(rounds: Rounds, objectives_ms: Mapping[str, float] | None = None, seed: int = 1) -> Contrasts:
    """Compare every arm with the first."""
    pairs = pair(rounds, objectives_ms)
    assert pairs is not None
    names = list(rounds[0])
    able = able_arms(arms_in(rounds), names[0])
    return contrasts(pairs, names, names[0], seed, able=able, has_objectives=bool(objectives_ms))


def arms_in(rounds: Rounds) -> list[Arm]:
    """Return the arms in the form of a report."""
    return [
        Arm(
            name=name,
            url="http://gateway",
            summary=summarise_runs([runs[name] for runs in rounds], ["pod-0"], is_compared=True),
        )
        for name in rounds[0]
    ]
