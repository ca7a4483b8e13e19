"""Requests on a pod, as the gateway tracks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class Sent:
    """A request that the pod has not finished."""

    prompt_tokens: int
    uncached_tokens: int
    context_tokens: int
    """Expected mean length of the context while the request decodes."""
    work_s: float
    """Seconds it takes: its prefill, and the decoding in the steps of its prefill beyond the first."""
    sent_s: float
    due_s: float
    """When its prefill should end."""
    promised_s: float
    """`due_s` as it was predicted when the request was sent."""
    streams: bool
    was_alone: bool
    """Nothing else was waiting when it was sent: its first token tells the pod's speed. Engines prefill several
    requests at a time, so times between first tokens would make a pod look faster the more requests it gets."""
    loads_adapter: bool = False
    """The pod had to load the adapter for this request."""
    is_elsewhere: bool = False
    """Another gateway sent the request, and reports its first token."""
    service_s: float | None = field(default=None, init=False)
    """Seconds to the first token, if they tell the pod's speed as soon as the computed tokens are known."""

    def late_from_s(self, spread: float, unsure_s: float) -> float:
        """Return the time from which a missing first token is late. Until then, noise (`spread`: of the pool's answers)
        or the unknown end of the step that ran when the request came (`unsure_s`) explains the delay."""
        return self.due_s + spread * (self.due_s - self.sent_s) + unsure_s


class Mark(NamedTuple):
    """What was known of a pod at one moment."""

    in_flight: int
    sent: int
    """Requests ever sent."""
