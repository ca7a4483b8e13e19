"""A pod in numbers: one row of a table of pods."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

EARLY_S = 1e-6
"""Rows are rebuilt this long before a limit, because sums of times are rounded."""

Number = TypeVar("Number")


class PodRow(NamedTuple, Generic[Number]):
    """What is known of a pod, in numbers that do not change while time passes: `PodTable` has a column for each.

    A request waits until `free_at_s`. If `due_s` was x seconds ago, the request waits at least x seconds from now, plus
    a step of `late_step_s`. Then it waits for what other gateways sent: the time to `others_until_s`, times
    `others_trust`."""

    free_at_s: Number
    due_s: Number
    """Time from which the first token of the oldest request that streams is late; infinite without such a request."""
    late_step_s: Number
    others_until_s: Number
    others_trust: Number
    others_span_s: Number
    """Seconds that the others' prefill takes, counted from the report."""
    others_uncached: Number
    """The others' prompt tokens still to be prefilled at that report, times the trust in it."""
    own_uncached: Number
    in_flight: Number
    is_busy: Number
    """1 if any request is in flight, else 0."""
    has_waiting: Number
    """1 if some request in flight does not decode yet, else 0."""
    decoding: Number
    context_tokens: Number
    stepped_s: Number
    token_s: Number
    overhead_s: Number
    weight: Number
    shared_latency_s: Number
    shared_token_s: Number
    """Seconds a token to fetch from the shared tier, as the pod reports; 0: it has none, or reports nothing."""
    is_prior: Number
    valid_until_s: Number
    """When the row has to be rebuilt even if nothing happens to the pod."""
