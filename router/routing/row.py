"""A pod in numbers, for decisions that look at many pods at once."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

EARLY_S = 1e-6
"""Rows are made anew this much before a limit, as sums of times are rounded."""

Number = TypeVar("Number")


class PodRow(NamedTuple, Generic[Number]):
    """`PodView` in numbers that stay what they are while time passes: `wide.py` has a column of each.

    A request waits until `free_at_s`; if `due_s` is past, until at least as long after now as that is before, and a
    step of `late_step_s`; and then for what the others sent, until `others_until_s`, times `others_trust`.
    """

    free_at_s: Number
    due_s: Number
    """When the oldest request whose first token can be seen should have had it; infinite without one."""
    late_step_s: Number
    others_until_s: Number
    others_trust: Number
    others_span_s: Number
    """Seconds that the others' prefill took from when it was reported."""
    others_uncached: Number
    """Their prompt tokens to be prefilled when it was reported, as far as that is trusted."""
    own_uncached: Number
    in_flight: Number
    decoding: Number
    context_tokens: Number
    stepped_s: Number
    fullness: Number
    token_s: Number
    overhead_s: Number
    weight: Number
    is_prior: Number
    valid_until_s: Number
    """When the pod has to be looked at again, if nothing happens to it before."""


def fullness(kv_used: float) -> float:
    """What KV pressure grows with: convex, about 6 at 90 % and 46 at 98 %, where it ends."""
    full = min(kv_used, 0.98)
    return full**4 / (1 - full)
