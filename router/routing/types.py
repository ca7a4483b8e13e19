"""What a policy sees and what it answers. Times are seconds of the gateway's monotonic clock.

What is made for every request is never changed once it was given away, though not frozen: freezing makes making it five
times as dear, and a decision makes a view for each pod.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCosts
from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.parting import Parting

PodId = NewType("PodId", str)
"""What an engine calls itself (`x-warmroute-pod`), or host:port of one that has no name for itself."""


@dataclass(slots=True)
class RequestInfo:
    """A request, as far as routing cares."""

    keys: tuple[PrefixKey, ...]
    """Prefix keys, shortest prefix first; empty for a prompt shorter than one stride."""
    prompt_tokens: int
    """Estimated from the canonical bytes and the model's learnt bytes per token; at least 1."""
    now_s: float
    output_tokens: int = 128
    """Expected length of the answer: learnt mean, or less where the request says so."""
    parting: Parting | None = None
    """Which pods this gateway tries before others do; None where it is the only one."""
    regret: float = 0.0
    """Probability that what a full pod evicts for the request is asked for again, 0 to 1."""
    session: int = 0
    """What its client calls a session, as a 64-bit number: among pods that are equal in all else, requests of one
    session go to one. 0: it names none."""


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
    """Requests of this gateway the pod has not finished, plus others' share from the pod's report."""
    in_flight_uncached_tokens: int = 0
    """Prompt tokens of those still to be prefilled."""
    decoding: int = 0
    context_tokens: int = 0
    """Tokens in the contexts of the decoding requests."""
    prefill_free_at_s: float = 0.0
    """Predicted time at which the pod's queued prefill ends; in the past for an idle pod."""
    stepped_s: float = -math.inf
    """When a step of the pod was last seen to end: a first token or the end of an answer came."""
    cost: StepCost = field(default_factory=StepCost)
    """Learnt constants of the pod; never all zero (a prior stands in until something is known)."""
    cost_is_prior: bool = False
    """Whether nothing was heard of the pod's speed lately: it is to be taken for as fast as its peers."""
    kv_used: float = 0.0
    """Share of KV blocks that running requests hold, 0 to 1; 0 where unknown."""
    weight: float = 1.0
    """Traffic it is meant to take beside others, for policies that do not learn what a pod can do; above 0."""
    adapter_s: float = 0.0
    """Seconds until the adapter that the request wants is loaded; 0 where it is, or nothing is known."""
    room_tokens: float = math.inf
    """Tokens that the pod's cache can take before it evicts something; infinite where that is not known."""
    overhead_s: float = 0.0
    """Seconds of each request beside its prefill, which nobody waits for; 0 for a pod that tells its constants."""
    fetch: FetchCosts = NO_FETCH_COSTS
    """What bringing the tokens from host memory and disk takes; need not be filled in where there are none."""


@dataclass(frozen=True, slots=True)
class PodScore:
    """A pod's score for one request: lowest is best; `parts` say where it comes from (seconds or tokens, by name)."""

    pod_id: PodId
    score: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rival:
    """The best pod that was not chosen: there the first token was predicted soonest."""

    pod: int
    """Index into the pods given."""
    ttft_s: float
    own_s: float
    """Part of it: the prefill of the request itself."""


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
    """Every pod's, in the order given; filled only when asked for (`explain`)."""
    rival: Rival | None = None
    """None for a policy that predicts no time, and where there is one pod."""


class Policy(Protocol):
    """A routing policy. State it keeps (a counter, traffic shares) is its own; it reads no clock and does no I/O."""

    name: str

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """The pod for the request. `pods` is never empty and in stable order of pod id.

        The answer depends on nothing but the arguments and the requests seen before. With `explain` the call must
        leave the policy's state as it was.
        """
