"""Fits the constants of a profile to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from engine.backend.profiles import SimProfile
from engine.sched.plan import StepPlan
from engine.sched.step_cost import step_features

Floats = npt.NDArray[np.float64]
_CONSTANTS = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """A step and the seconds that it took."""

    plan: StepPlan
    elapsed_s: float


def fit_profile(name: str, steps: Sequence[Measured], kv_tokens: int) -> SimProfile:
    """Return the profile with the least squared relative error and no negative constant.

    In the formula of `profiles.py`, steps of few tokens take the floor w0, and larger ones a + c1 * T_new. For every
    size at which the floor may end, the constants are found by non-negative least squares. Raises ValueError without
    steps.
    """
    if not steps:
        raise ValueError("a profile needs measured steps")
    features = np.array([step_features(step.plan) for step in steps])
    took_ms = np.array([step.elapsed_s for step in steps]) * 1e3
    new_tokens = features[:, 1] + features[:, 4]
    best, least = np.zeros(_CONSTANTS), np.inf
    for bound in (0.0, *np.unique(new_tokens)):
        constants = _given_floor(new_tokens <= bound, new_tokens, features[:, 2:], took_ms)
        error = float(((_predicted_ms(constants, new_tokens, features[:, 2:]) / took_ms - 1) ** 2).sum())
        if error < least * (1 - 1e-9):
            best, least = constants, error
    w0, a, c1, c2, c3, c4 = (float(f"{value:.4g}") for value in best)
    return SimProfile(name, max(w0, a), a, c1, c2, c3, c4, kv_tokens)


def relative_errors(profile: SimProfile, steps: Sequence[Measured]) -> Floats:
    """Return |predicted / measured - 1| of each step."""
    return np.array([abs(profile.step_s(step.plan) / step.elapsed_s - 1) for step in steps])


def _given_floor(on_floor: npt.NDArray[np.bool_], new_tokens: Floats, rest: Floats, took_ms: Floats) -> Floats:
    """Return w0, a, c1, c2, c3, c4 if `on_floor` says which steps take the floor w0."""
    line = ~on_floor
    columns = np.column_stack((on_floor, line, line * new_tokens, rest)).astype(np.float64) / took_ms[:, None]
    return _non_negative_least_squares(columns, np.ones(len(took_ms)))


def _non_negative_least_squares(columns: Floats, wanted: Floats) -> Floats:
    """Return the minimiser of |columns w - wanted| over w >= 0, by trying all sets of columns, 63 at most."""
    scale = np.linalg.norm(columns, axis=0)
    present = [i for i in range(columns.shape[1]) if scale[i] > 0]
    gram, right = columns.T @ columns, columns.T @ wanted
    best, best_gain = np.zeros(columns.shape[1]), 0.0
    for size in range(1, len(present) + 1):
        for chosen in combinations(present, size):
            at = list(chosen)
            # The columns are scaled, because tokens and pairs of tokens differ by ten orders of magnitude.
            inner = gram[np.ix_(at, at)] / np.outer(scale[at], scale[at])
            solution = np.linalg.lstsq(inner, right[at] / scale[at], rcond=1e-10)[0] / scale[at]
            gain = float(right[at] @ solution)
            if solution.min() >= 0 and gain > best_gain * (1 + 1e-12):
                best = np.zeros(columns.shape[1])
                best[at], best_gain = solution, gain
    return best


def _predicted_ms(constants: Floats, new_tokens: Floats, rest: Floats) -> Floats:
    w0, a, c1 = constants[:3]
    linear: Floats = np.maximum(max(w0, a), a + c1 * new_tokens) + rest @ constants[3:]
    return linear
