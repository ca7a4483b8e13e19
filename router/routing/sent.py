"""A request on its pod, as the gateway reckons with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Sent:
    """A request of this gateway that the pod has not finished."""

    prompt_tokens: int
    uncached_tokens: int
    context_tokens: int
    """Expected mean length of its context while it decodes."""
    work_s: float
    """Time it takes: its prefill, and what decodes beside it in its steps beyond the first."""
    sent_s: float
    due_s: float
    """When its prefill should end."""
    promised_s: float
    """The same, as it was thought when it was sent."""
    streams: bool
    was_alone: bool
    """Nothing else was waiting when it was sent: its first token tells the pod's speed. Engines prefill several
    requests at a time; taken from one first token to the next, a pod would look the faster the more it is sent."""
