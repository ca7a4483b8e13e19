"""Requests on their pod, as the gateway reckons with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


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
    loads_adapter: bool = False
    """Its adapter had to be loaded for it."""
    service_s: float | None = field(default=None, init=False)
    """Time to its first token, where that tells the pod's speed once it is known how much was computed for it."""


class Mark(NamedTuple):
    """How much was known of a pod at one moment."""

    in_flight: int
    sent: int
    """Requests ever sent."""
