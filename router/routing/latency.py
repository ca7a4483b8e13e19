"""How long a pod takes: the formulas of a step's cost, and its constants fitted to observed times to first token."""

from __future__ import annotations

from engine.contract.fetch_costs import FetchCost
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


def prefill_s(cost: StepCost, uncached_tokens: float, prompt_tokens: float) -> float:
    """Seconds of prefill that a request brings: `u/rate + c*u*(prompt - u/2)` of DESIGN.md 5, the second part being
    the attention of the u uncached tokens over everything before them."""
    return uncached_tokens * (cost.token_s + cost.attention_s * (prompt_tokens - uncached_tokens / 2))


def decode_s(cost: StepCost, decoding: int, context_tokens: float) -> float:
    """Seconds of one step apart from its prefill: its fixed part and its decoding sequences."""
    return cost.base_s + cost.sequence_s * decoding + cost.context_s * context_tokens


def told_s(tokens: int, cost: FetchCost) -> float:
    """Seconds that a pod says it takes to fetch so many tokens from a tier; 0: none, or it says nothing."""
    return cost.seconds(tokens) if tokens and cost.token_s else 0.0


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
