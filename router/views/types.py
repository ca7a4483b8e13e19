"""What a policy sees and what it answers. Times are seconds of the gateway's monotonic clock.

Objects made for every request are never changed after they are handed out. They are not frozen all the same: a frozen
dataclass takes five times as long to make, and a decision makes a view for each pod.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCosts
from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.views.pod_partition import Parting

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
    parting: Parting | None = None
    """Which pods this gateway tries before others do; None if it is the only gateway."""
    regret: float = 0.0
    """Probability that what a full pod evicts for the request is asked for again, 0 to 1."""
    session: int = 0
    """The client's session id as a 64-bit number; 0 without one. Among pods that are equal in all else, requests of
    one session go to the same pod."""

    @property
    def share(self) -> float:
        """Share of all gateways' work that this gateway's requests stand for, above 0, at most 1: see
        `Parting.share`."""
        return 1.0 if self.parting is None else self.parting.share


@dataclass(slots=True)
class PodView:
    """One pod that may serve the request, at the moment of the decision."""

    pod_id: PodId
    matched_tokens: int = 0
    """Prompt tokens whose KV the pod is believed to hold, in any tier."""
    host_tokens: int = 0
    """Of these, tokens that must come from host memory."""
    disk_tokens: int = 0
    """Of these, tokens that must come from disk."""
    in_flight: int = 0
    """This gateway's requests that the pod has not finished, plus others' share from the pod's report."""
    in_flight_uncached_tokens: int = 0
    """Prompt tokens of these requests that are still to be prefilled."""
    decoding: int = 0
    context_tokens: int = 0
    """Tokens in the contexts of the decoding requests."""
    prefill_free_at_s: float = 0.0
    """Predicted time at which the pod's queued prefill ends; in the past for an idle pod."""
    stepped_s: float = -math.inf
    """When a step of the pod was last seen to end: a first token or the end of an answer came."""
    sent_s: float = -math.inf
    """When a request was last sent to the pod, as far as this gateway knows."""
    cost: StepCost = field(default_factory=StepCost)
    """Learnt constants of the pod; never all zero (a prior stands in until something is known)."""
    cost_is_prior: bool = False
    """Whether nothing was heard of the pod's speed lately; the pod then counts as fast as its peers."""
    kv_used: float = 0.0
    """Share of KV blocks that running requests hold, 0 to 1; 0 if unknown."""
    weight: float = 1.0
    """Share of traffic relative to other pods, for policies that do not learn a pod's speed; above 0."""
    adapter_s: float = 0.0
    """Seconds until the adapter that the request wants is loaded; 0 if it is loaded, or if nothing is known."""
    room_tokens: float = math.inf
    """Tokens that the pod's cache can take before it evicts something; infinite if unknown."""
    overhead_s: float = 0.0
    """Seconds of each request besides its prefill that delay no other request; 0 for a pod that reports constants."""
    fetch: FetchCosts = NO_FETCH_COSTS
    """What fetching tokens from the pod's tiers costs, as the pod last reported."""
    shared_tokens: int = 0
    """Tokens behind the matched ones that the pod does not hold, but can fetch from the shared tier sooner than it
    computes them."""


@dataclass(frozen=True, slots=True)
class PodScore:
    """A pod's score for one request: lowest is best. `parts`: the terms of the score by name, in seconds or tokens."""

    pod_id: PodId
    score: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rival:
    """The best pod that was not chosen: the one with the soonest predicted first token."""

    pod: int
    """Index into the pods given."""
    ttft_s: float
    own_s: float
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


class Policy(Protocol):
    """A routing policy. It owns any state it keeps (a counter, traffic shares), reads no clock and does no I/O."""

    name: str

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """Return the pod for the request. `pods` is never empty and in stable order of pod id.

        The answer depends only on the arguments and the requests seen before. With `explain` the call must
        leave the policy's state as it was.
        """
