"""How long a pod takes: the formulas of a step's cost, and its constants fitted to observed times to first token."""

from __future__ import annotations

import math

from engine.contract.load import StepCost

PRIOR = StepCost(base_s=0.01, token_s=1e-4)
"""Believed of a pod until something is known: 10,000 prefill tokens/s, 10 ms a step."""
OBSERVATION_S = 60.0
"""A fit to observed times counts this long: else a pod that was slow once would be avoided, and never seen again."""

ENOUGH_OBSERVATIONS = 10
"""A fit to fewer leans on the prior: a pod that has just joined would look slow and, left alone, stay so."""

STEP_TOKENS = 2048
"""Prefill tokens of one step; engines do not report it. The default of the bundled engine, and long that of vLLM's
`max_num_batched_tokens`; where steps are larger, decoding counts for too much beside very long prompts."""

_UNIT_TOKENS = 1000
_FORGET = 0.98
"""Weight an observation keeps at each later one: about the last 50 count."""
_PRIOR_WEIGHT = 0.1
_PRIOR_TOKENS = 2000.0
"""The prior counts as two requests of that weight: one of no tokens, one of so many."""
_OUTLIER = 10.0
"""A time this many times the expected one counts as that: one stall must not spoil the fit, a slow pod still shows."""
_FASTEST_TOKEN_S = 1e-7


def prefill_s(cost: StepCost, uncached_tokens: float, prompt_tokens: float) -> float:
    """Seconds of prefill that a request brings: `u/rate + c*u*(prompt - u/2)` of DESIGN.md 5, the second part being
    the attention of the u uncached tokens over everything before them."""
    return uncached_tokens * (cost.token_s + cost.attention_s * (prompt_tokens - uncached_tokens / 2))


def decode_s(cost: StepCost, decoding: int, context_tokens: float) -> float:
    """Seconds of one step apart from its prefill: its fixed part and its decoding sequences."""
    return cost.base_s + cost.sequence_s * decoding + cost.context_s * context_tokens


def unit_s(cost: StepCost) -> float:
    """One number for a pod's speed: seconds of a step of 1,000 prefill tokens that decodes nothing."""
    return cost.base_s + _UNIT_TOKENS * cost.token_s


def step_left_s(step_s: float, elapsed_s: float) -> float:
    """Seconds until the running step ends, of which the last was seen to end `elapsed_s` ago.

    Within a step, on average halfway. One that has just begun lasts longer; how soon one ends is not relied on, as a
    request that comes a moment too late waits for the whole of the next.
    """
    return max(step_s / 2, step_s - elapsed_s)


def further_steps(uncached_tokens: float, step_tokens: int = STEP_TOKENS) -> float:
    """Steps that a prefill takes beyond its first, each with all the decoding of its pod in it.

    Not rounded: what is left of a prefill shares its last step with the next.
    """
    return uncached_tokens / step_tokens - 1 if uncached_tokens > step_tokens else 0.0


class PodSpeed:
    """What is known of one pod's speed, best source first: its own constants, a fit to the answers seen, the prior."""

    __slots__ = ("_fit", "_observations", "_observed_s", "_reported", "cost")

    def __init__(self) -> None:
        self.cost = PRIOR
        self._reported: StepCost | None = None
        self._observed_s: float | None = None
        self._observations = 0
        self._fit = _LatencyFit()

    def is_known(self, now_s: float) -> bool:
        """Whether `cost` rests on anything but the prior, and old or few observations."""
        if self._reported is not None:
            return True
        if self._observed_s is None or now_s - self._observed_s > OBSERVATION_S:
            return False
        return self._observations >= ENOUGH_OBSERVATIONS

    @property
    def known_until_s(self) -> float:
        """When `is_known` ends to be so if nothing more is heard, once it is."""
        return math.inf if self._reported is not None or self._observed_s is None else self._observed_s + OBSERVATION_S

    def report(self, cost: StepCost) -> None:
        """The pod's own constants; ignored while it knows none."""
        if cost.token_s > 0:
            self._reported = self.cost = cost

    def observe(self, uncached_tokens: int, service_s: float, now_s: float) -> None:
        """A prefill took `service_s`, waiting for others not counted."""
        self._observed_s = now_s
        self._observations += 1
        self._fit.observe(uncached_tokens, service_s)
        if self._reported is None:
            self.cost = self._fit.cost


class _LatencyFit:
    """`seconds = base_s + token_s * uncached tokens`, by least squares over recent requests and a weak prior."""

    __slots__ = ("_cost", "_t", "_tt", "_ty", "_w", "_y")

    def __init__(self) -> None:
        self._w = self._t = self._tt = self._y = self._ty = 0.0
        self._cost = PRIOR

    @property
    def cost(self) -> StepCost:
        """The constants fitted so far; those a time to first token does not show are zero."""
        return self._cost

    def observe(self, uncached_tokens: int, service_s: float) -> None:
        """A request's prefill of `uncached_tokens` took `service_s`, waiting for others not counted."""
        expected_s = self._cost.base_s + self._cost.token_s * uncached_tokens
        seconds = min(service_s, _OUTLIER * expected_s)
        self._w = _FORGET * self._w + 1
        self._t = _FORGET * self._t + uncached_tokens
        self._tt = _FORGET * self._tt + uncached_tokens**2
        self._y = _FORGET * self._y + seconds
        self._ty = _FORGET * self._ty + uncached_tokens * seconds
        self._cost = self._solve()

    def _solve(self) -> StepCost:
        tokens = _PRIOR_WEIGHT * _PRIOR_TOKENS
        seconds = PRIOR.base_s + PRIOR.token_s * _PRIOR_TOKENS
        w = self._w + 2 * _PRIOR_WEIGHT
        t = self._t + tokens
        tt = self._tt + tokens * _PRIOR_TOKENS
        y = self._y + _PRIOR_WEIGHT * (PRIOR.base_s + seconds)
        ty = self._ty + tokens * seconds
        token_s = max((w * ty - t * y) / (w * tt - t * t), _FASTEST_TOKEN_S)
        base_s = (y - token_s * t) / w
        if base_s < 0:
            base_s, token_s = 0.0, ty / tt
        return StepCost(base_s=base_s, token_s=token_s)
