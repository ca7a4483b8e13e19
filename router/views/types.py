"""A request as a policy sees it, and what a policy answers. Times are seconds of the gateway's monotonic clock.

Objects made for every request are never changed after they are handed out. They are not frozen all the same: a frozen
dataclass takes five times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from engine.contract.keys import PrefixKey
from router.views.pod_partition import PodPartition

PodId = NewType("PodId", str)
"""The name an engine gives itself (`x-warmroute-pod`), or host:port of an engine without one."""


@dataclass(slots=True)
class RequestInfo:
    """What routing knows about a request."""

    keys: tuple[PrefixKey, ...]
    """Prefix keys, shortest prefix first; empty for a prompt shorter than one stride."""
    prompt_tokens: int
    """Estimated from the canonical bytes and the model's learnt bytes per token; at least 1."""
    now_s: float
    output_tokens: int = 128
    """Expected length of the answer: the learnt mean, or less if the request says so."""
    partition: PodPartition | None = None
    """Which pods this gateway tries before others do; None if it is the only gateway."""
    regret: float = 0.0
    """Probability that what a full pod evicts for the request is asked for again, 0 to 1."""
    session: int = 0
    """The client's session id as a 64-bit number; 0 without one. Among pods that are equal in all else, requests of
    one session go to the same pod."""

    @property
    def share(self) -> float:
        """Share of all gateways' work that this gateway's requests stand for, above 0, at most 1: see
        `PodPartition.share`."""
        return 1.0 if self.partition is None else self.partition.share


@dataclass(frozen=True, slots=True)
class PodScore:
    """A pod's score for one request: lowest is best. `parts`: the terms of the score by name, in seconds or tokens."""

    pod_id: PodId
    score: float
    parts: dict[str, float] = field(default_factory=dict)
    left_out_by: str = ""
    """The rule for ties that left the pod out (`router/routing/ties.py`); empty for the chosen pod, and if the policy
    has no such rules."""


@dataclass(slots=True)
class Rival:
    """The best pod that was not chosen: the one with the soonest predicted first token."""

    pod: int
    """Index into the pods given."""
    ttft_s: float
    prefill_s: float
    """Part of `ttft_s`: the prefill of the request itself."""


@dataclass(slots=True)
class Decision:
    """Where to send a request, and why."""

    pod: int
    """Index into the pods given."""
    policy: str
    predicted_cached_tokens: int
    predicted_ttft_s: float | None
    """None for a policy that predicts no time."""
    scores: tuple[PodScore, ...] = ()
    """Every pod's score, in the order given; filled only on request (`explain`)."""
    rival: Rival | None = None
    """None for a policy that predicts no time, and if there is only one pod."""
