"""Learns what a step costs from the steps that ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from engine.contract.load import StepCost
from engine.sched.plan import SequenceChunk, StepPlan

_FEATURES = 5
_FORGET = 0.99
"""Factor on a step's weight for each newer step of its kind: the last hundred or so count."""
_MIN_PREFILL_STEPS = 8
_MIN_TOLERANCE = 0.25
_REFIT_EVERY = 32
_LEAST_FITS = 16
"""Fits after which the search for the shortest step starts anew. The shortest step found so far counts for this many
more fits."""


def step_features(plan: StepPlan) -> tuple[float, float, float, float, float]:
    """Return what the five coefficients of `StepCost` multiply, in the order of its fields."""
    tokens = attention = 0.0
    ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks if chunk.decodes]
    if len(ends) < len(plan.chunks):
        for chunk in plan.chunks:
            if not chunk.decodes:
                count = len(chunk.tokens)
                tokens += count
                attention += count * (chunk.start + count / 2)
    return 1.0, tokens, attention, float(sum(ends)), float(len(ends))


def pace_of(cost: StepCost, chunks: Sequence[SequenceChunk]) -> tuple[float, float]:
    """Return the seconds of a step of these chunks, and of the steps after it, with the same decodes and no prefill."""
    return _predicted_s(cost, chunks), _predicted_s(cost, [chunk for chunk in chunks if chunk.decodes])


def _predicted_s(cost: StepCost, chunks: Sequence[SequenceChunk]) -> float:
    """Return the seconds of a step of these chunks; 0 without any."""
    if not chunks:
        return 0.0
    base, tokens, attention, context, sequences = step_features(StepPlan(tuple(chunks)))
    prefill_s = cost.base_s * base + cost.token_s * tokens + cost.attention_s * attention
    return prefill_s + cost.context_s * context + cost.sequence_s * sequences


class StepCostFit:
    """Non-negative least squares of relative error, in which old steps fade exponentially.

    Steps with a prefill and pure decode steps are summed separately and fade separately, so thousands of decode steps
    in a row do not change what is known about prefill. A time far from its prediction is clipped to the usual range.
    This range widens while such times persist. So one hiccup changes little, but a device that has become slower is
    followed.
    """

    def __init__(self) -> None:
        self._prefill = _Moments()
        self._decode = _Moments()
        self._prefill_steps = 0
        self._deviation = 0.0
        self._least_s = [math.inf, math.inf]
        self._coefficients = [0.0] * _FEATURES
        self._since_fit = 0
        self._fits = 0

    def observe(self, plan: StepPlan, elapsed_s: float, steps: int = 1) -> None:
        """Learn that a step took `elapsed_s`, or each of a run of `steps` on average. Ignores times of 0 or less."""
        if elapsed_s <= 0:
            return
        self._least_s[-1] = min(self._least_s[-1], elapsed_s)
        features = step_features(plan)
        if steps > 1:  # each sequence grows by a token per step
            base, tokens, attention, context, sequences = features
            features = (base, tokens, attention, context + sequences * (steps - 1) / 2, sequences)
        predicted_s = sum(c * x for c, x in zip(self._coefficients, features, strict=True))
        reference_s = predicted_s or elapsed_s
        ratio = elapsed_s / reference_s
        tolerance = 1 + _MIN_TOLERANCE + 2 * self._deviation
        clipped_s = reference_s * min(max(ratio, 1 / tolerance), tolerance)
        self._deviation += 0.1 * (min(abs(ratio - 1), 2.0) - self._deviation)
        has_prefill = features[1] > 0
        (self._prefill if has_prefill else self._decode).add(features, clipped_s, 1 / reference_s**2)
        self._prefill_steps += has_prefill
        self._since_fit += 1
        if self._prefill_steps >= _MIN_PREFILL_STEPS and (self._since_fit >= _REFIT_EVERY or not predicted_s):
            self._fit()

    @property
    def least_s(self) -> float:
        """Seconds of the shortest recent step; 0 before the first. A device has a floor that the fit does not show."""
        least_s = min(self._least_s)
        return 0.0 if math.isinf(least_s) else least_s

    def cost(self) -> StepCost:
        """Return the fitted coefficients; all zero until a few prefill steps have been seen."""
        return StepCost(*self._coefficients)

    def _fit(self) -> None:
        self._since_fit = 0
        self._fits += 1
        if not self._fits % _LEAST_FITS:
            self._least_s = [self._least_s[-1], math.inf]
        matrix = [
            [a + b for a, b in zip(row, other, strict=True)]
            for row, other in zip(self._prefill.matrix, self._decode.matrix, strict=True)
        ]
        vector = [a + b for a, b in zip(self._prefill.vector, self._decode.vector, strict=True)]
        self._coefficients = _non_negative_least_squares(matrix, vector)


class _Moments:
    """Exponentially fading sums of w x xT and w x y, for weights w, features x and seconds y."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * _FEATURES for _ in range(_FEATURES)]
        self.vector = [0.0] * _FEATURES

    def add(self, x: tuple[float, ...], y: float, weight: float) -> None:
        for i, row in enumerate(self.matrix):
            if x[i] or row[i]:  # otherwise the row has always been zero and stays so
                scaled = weight * x[i]
                row[:] = [_FORGET * old + scaled * other for old, other in zip(row, x, strict=True)]
                self.vector[i] = _FORGET * self.vector[i] + scaled * y


def _non_negative_least_squares(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Return the minimiser of wT A w - 2 bT w over w >= 0. Coefficients of features not seen yet stay zero."""
    present = tuple(i for i in range(_FEATURES) if matrix[i][i] > 0)
    return _drop_negatives(matrix, vector, present) or _try_every_set(matrix, vector, present)


def _drop_negatives(matrix: list[list[float]], vector: list[float], chosen: tuple[int, ...]) -> list[float] | None:
    """Solve without bounds, drop the most negative coefficient, repeat. Return None if the result may not be the
    minimum."""
    while chosen:
        solution = _solve(matrix, vector, chosen)
        if min(solution) >= 0:
            full = _spread(chosen, solution)
            slopes = [vector[i] - sum(a * w for a, w in zip(matrix[i], full, strict=True)) for i in range(_FEATURES)]
            return full if all(slopes[i] <= 1e-6 * abs(vector[i]) for i in range(_FEATURES)) else None
        worst = solution.index(min(solution))
        chosen = chosen[:worst] + chosen[worst + 1 :]
    return None


def _try_every_set(matrix: list[list[float]], vector: list[float], present: tuple[int, ...]) -> list[float]:
    """Return the best of all sets of positive coefficients (31 at most): exact, and slow.

    The best feasible solution of an unconstrained subproblem is the constrained optimum; at such a solution the
    objective is -bT w.
    """
    best, best_gain = [0.0] * _FEATURES, 0.0
    for size in range(1, len(present) + 1):
        for chosen in combinations(present, size):
            solution = _solve(matrix, vector, chosen)
            if min(solution) < 0:
                continue
            gain = sum(vector[i] * w for i, w in zip(chosen, solution, strict=True))
            if gain > best_gain * (1 + 1e-9):
                best, best_gain = _spread(chosen, solution), gain
    return best


def _spread(chosen: tuple[int, ...], solution: list[float]) -> list[float]:
    full = [0.0] * _FEATURES
    for i, w in zip(chosen, solution, strict=True):
        full[i] = w
    return full


def _solve(matrix: list[list[float]], vector: list[float], chosen: tuple[int, ...]) -> list[float]:
    """Solve the chosen rows and columns by Gaussian elimination.

    A feature that depends on those before it (a batch that never changes looks like the base) gets zero.
    """
    scale = [matrix[i][i] ** -0.5 for i in chosen]
    rows = [
        [matrix[i][j] * scale[a] * scale[b] for b, j in enumerate(chosen)] + [vector[i] * scale[a]]
        for a, i in enumerate(chosen)
    ]
    size = len(chosen)
    # The matrix is positive semi-definite with a unit diagonal: elimination needs no exchange of rows.
    independent = []
    for k in range(size):
        if rows[k][k] < 1e-9:
            continue
        independent.append(k)
        for row in rows[k + 1 :]:
            factor = row[k] / rows[k][k]
            for j in range(k, size + 1):
                row[j] -= factor * rows[k][j]
    solution = [0.0] * size
    for k in reversed(independent):
        rest = sum(rows[k][j] * solution[j] for j in independent if j > k)
        solution[k] = (rows[k][size] - rest) / rows[k][k]
    return [w * s for w, s in zip(solution, scale, strict=True)]
