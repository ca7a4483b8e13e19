"""How long a pod takes: the formulas of a step's cost, and its constants fitted to observed times to first token."""

from __future__ import annotations

from engine.contract.fetch_costs import FetchCost
from engine.contract.load import StepCost

PRIOR = StepCost(base_s=0.01, token_s=1e-4)
"""Constants of a pod until something is known about it: 10,000 prefill tokens/s, 10 ms a step."""
OBSERVATION_S = 60.0
"""A fit to observed times counts this long. Otherwise a pod that was slow once would be avoided for good."""

ENOUGH_OBSERVATIONS = 10
"""A fit to fewer answers leans on the prior. Otherwise a pod that has just joined could look slow, get no requests, and
go on looking slow."""

STEP_TOKENS = 2048
"""Prefill tokens of one step; engines do not report it. It is the bundled engine's default, and was long the default
of vLLM's `max_num_batched_tokens`. If steps are larger, decoding counts for too much beside very long prompts."""

_UNIT_TOKENS = 1000


def prefill_s(cost: StepCost, uncached_tokens: float, prompt_tokens: float) -> float:
    """Return the seconds of prefill that a request brings: `u/rate + c*u*(prompt - u/2)` for u uncached tokens.

    The second part is the attention of these tokens over everything before them.
    """
    # What is the same for all pods stands together: numpy then has three operations, not five.
    return uncached_tokens * (cost.token_s + cost.attention_s * prompt_tokens - cost.attention_s / 2 * uncached_tokens)


def decode_s(cost: StepCost, decoding: int, context_tokens: float) -> float:
    """Return the seconds of one step without its prefill: its fixed part and its decoding sequences."""
    return cost.base_s + cost.sequence_s * decoding + cost.context_s * context_tokens


def told_s(tokens: int, cost: FetchCost) -> float:
    """Return the seconds that a pod says it takes to fetch `tokens` from a tier; 0: no tokens, or it says nothing."""
    return cost.seconds(tokens) if tokens and cost.token_s else 0.0


def unit_s(cost: StepCost) -> float:
    """Return one number for a pod's speed: seconds of a step of 1,000 prefill tokens that decodes nothing."""
    return cost.base_s + _UNIT_TOKENS * cost.token_s


def has_fixed(cost: StepCost) -> bool:
    """Whether the constants contain the fixed part of a step, as reported constants do. Learnt constants have it in the
    overhead of a request."""
    return cost.base_s > 0


def step_left_s(step_s: float, elapsed_s: float) -> float:
    """Return the seconds until the running step ends, if the last one was seen to end `elapsed_s` ago.

    On average half of a step is left. A step that has just begun lasts longer. An early end is not relied on, because
    a request that comes a moment too late waits for the whole next step.
    """
    return max(step_s / 2, step_s - elapsed_s)


def further_steps(uncached_tokens: float, step_tokens: int = STEP_TOKENS) -> float:
    """Return the steps that a prefill takes beyond its first. Each of them contains all the decoding of its pod.

    The number is not rounded: the rest of a prefill shares its last step with the next prefill.
    """
    return uncached_tokens / step_tokens - 1 if uncached_tokens > step_tokens else 0.0
