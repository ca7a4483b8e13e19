"""How much longer a step takes than its profile says: what a machine that is shared with others does to an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from xxhash import xxh3_64_intdigest

_NORMAL = NormalDist()
_UNITS = 1 << 53


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Factors of step times, log-normal with median 1. Each is the standard deviation of a logarithm, 0: none.

    A function of seed, pod and time alone: equal runs are equal, whatever else is drawn.
    """

    step: float = 0.0
    """Of each step by itself."""
    spell: float = 0.0
    """Of a pod for `spell_s` at a time, as if another process took its cores."""
    common: float = 0.0
    """Of all pods alike for `spell_s` at a time, as if they shared one machine."""
    spell_s: float = 2.0
    seed: int = 0

    def factor(self, pod: str, step: int, now_s: float) -> float:
        """For the pod's step of that number, which begins now."""
        spell = int(now_s / self.spell_s)
        logarithm = self.step * self._draw(f"step {pod} {step}") + self.spell * self._draw(f"spell {pod} {spell}")
        return math.exp(logarithm + self.common * self._draw(f"common {spell}"))

    def _draw(self, name: str) -> float:
        bits = xxh3_64_intdigest(name.encode(), self.seed) >> 11
        return _NORMAL.inv_cdf((bits + 0.5) / _UNITS)
