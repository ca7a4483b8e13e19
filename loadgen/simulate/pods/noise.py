"""How much longer a step takes than its profile says, as on a machine that the engine shares with other processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from xxhash import xxh3_64_intdigest

_NORMAL = NormalDist()
_UNITS = 1 << 53


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Factors of step times, log-normal with median 1. Each field is the standard deviation of a logarithm; 0: none.

    The factors depend only on seed, pod and time, so equal runs are equal, whatever else is drawn.
    """

    step: float = 0.0
    """Noise of each single step."""
    spell: float = 0.0
    """Noise of one pod for `spell_s` at a time, as if another process took its cores."""
    common: float = 0.0
    """Noise of all pods alike for `spell_s` at a time, as if they shared one machine."""
    spell_s: float = 2.0
    seed: int = 0

    def factor(self, pod: str, step: int, now_s: float) -> float:
        """Return the factor for the pod's step with this number, which begins now."""
        spell = int(now_s / self.spell_s)
        logarithm = self.step * self._draw(f"step {pod} {step}") + self.spell * self._draw(f"spell {pod} {spell}")
        return math.exp(logarithm + self.common * self._draw(f"common {spell}"))

    def _draw(self, name: str) -> float:
        bits = xxh3_64_intdigest(name.encode(), self.seed) >> 11
        return _NORMAL.inv_cdf((bits + 0.5) / _UNITS)
