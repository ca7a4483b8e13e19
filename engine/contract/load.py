"""An engine's report of its load and its speed, in every registry entry."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, field

from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCosts


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one engine step, fitted by the engine to its own steps.

    step_s = base_s + token_s * T + attention_s * sum_i t_i * (p_i + t_i / 2) + context_s * sum(decode context)
             + sequence_s * decoding sequences
    T: prefill tokens of the step; t_i, p_i: a prefill chunk's tokens and the tokens before it. All zero: not known yet.
    Form: Mooncake (FAST'25) eq. 1 and Vidur's per-operation regressors, reduced to the terms that matter.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    attention_s: float = 0.0
    context_s: float = 0.0
    sequence_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """An engine's load at one moment."""

    running: int = 0
    """Requests that hold KV blocks."""
    waiting: int = 0
    """Requests that wait for a first step."""
    uncached_tokens: int = 0
    """Prompt tokens still to be prefilled, of waiting and running requests together."""
    decoding: int = 0
    """Running requests past their prefill."""
    context_tokens: int = 0
    """Tokens in the contexts of the decoding requests."""
    blocks_free: int = 0
    """KV blocks that a request could take at once, reusable cached ones included."""
    blocks_total: int = 0
    block_size: int = 0
    """Tokens per KV block."""
    cost: StepCost = field(default_factory=StepCost)
    fetch: FetchCosts = NO_FETCH_COSTS
    """It is not in the report's bytes: see `fetch_costs.py`."""


MAX_REQUESTS = 1_000_000
MAX_TOKENS = 10**12
MAX_BLOCK_SIZE = 1_000_000
MAX_STEP_S = 60.0
MAX_TOKEN_S = 1.0
"""Greater numbers are absurd: no engine has so many requests or tokens, or is so slow."""

_LAYOUT = struct.Struct("<IIQIQIII5d")
LOAD_REPORT_BYTES = _LAYOUT.size


def pack_load(report: LoadReport) -> bytes:
    """Return `LOAD_REPORT_BYTES` bytes: little-endian, fields in the order of the class, without `fetch`."""
    *counts, cost, _ = (getattr(report, name) for name in LoadReport.__slots__)
    return _LAYOUT.pack(*counts, *astuple(cost))


def unpack_load(data: bytes, offset: int = 0) -> LoadReport:
    """The inverse of `pack_load`, from `offset`. Raises struct.error on short data, ValueError on absurd numbers."""
    running, waiting, uncached, decoding, context, free, total, size, *cost = _LAYOUT.unpack_from(data, offset)
    if max(running, waiting, decoding) > MAX_REQUESTS or max(uncached, context) > MAX_TOKENS or size > MAX_BLOCK_SIZE:
        raise ValueError("load report with absurd counts")
    base_s, token_s, attention_s, context_s, sequence_s = cost
    in_a_step, for_a_token = (base_s, sequence_s), (token_s, attention_s, context_s)
    # Written so that the condition is False for NaN.
    if not (all(0 <= s <= MAX_STEP_S for s in in_a_step) and all(0 <= s <= MAX_TOKEN_S for s in for_a_token)):
        raise ValueError(f"load report with absurd costs: {', '.join(f'{seconds:g}' for seconds in cost)}")
    return LoadReport(running, waiting, uncached, decoding, context, free, total, size, StepCost(*cost))
