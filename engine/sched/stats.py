"""Counters of a scheduler since it was created."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only grow. For a period, subtract the counters at its start from those at its end."""

    prompt_tokens_queried: int = 0
    """Prompt tokens of requests at their first admission."""
    prompt_tokens_hit: int = 0
    """Those of the queried tokens whose KV was reused."""
    steps: int = 0
    failed_steps: int = 0
    prefill_tokens: int = 0
    """Tokens computed by prefill chunks, repeated ones included."""
    generated_tokens: int = 0
    preemptions: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    aborted: int = 0
    evicted_blocks: int = 0
    """Cached blocks whose content was evicted."""
    evicted_too_soon: int = 0
    """Evicted blocks that were asked for again before about four pools' worth of other blocks were evicted."""
    failed: int = 0
    """Requests dropped by a failed step."""
