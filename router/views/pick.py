"""From scores to a decision: what every policy shares."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from router.views.types import Decision, PodId, PodScore, PodView, RequestInfo, Rival

Parts = Sequence[Mapping[str, float]]


def load(pod: PodView) -> float:
    """Return a pod's load divided by its weight: prompt tokens still to be prefilled; requests decide between
    equals."""
    return (pod.in_flight_uncached_tokens + pod.in_flight * 1e-6) / pod.weight


def bound_per_weight(pods: Sequence[PodView], bound: float) -> float:
    """Return how many requests a pod of weight 1 may have: `bound` times its share, with the new request counted."""
    return bound * (sum([pod.in_flight for pod in pods]) + 1) / sum([pod.weight for pod in pods])


def lowest(request: RequestInfo, pods: Sequence[PodView], scores: Sequence[float]) -> int:
    """Return the index of the lowest score. A rendezvous hash breaks ties: equal prompts go to one pod, and unlike
    prompts are spread."""
    best = min(scores)
    if scores.count(best) == 1:
        return scores.index(best)
    return by_hash(request, [(pods[i].pod_id, i) for i, score in enumerate(scores) if score == best])


def by_hash(request: RequestInfo, tied: Sequence[tuple[PodId, int]]) -> int:
    """Return the place of one of the `tied` (pod, place) pairs, by a hash of the request's session or deepest key."""
    if request.session:
        seed = request.session
    else:
        seed = request.keys[-1] if request.keys else xxh3_64_intdigest(struct.pack("<d", request.now_s))
    return max([(xxh3_64_intdigest(pod_id.encode(), seed), pod_id, place) for pod_id, place in tied])[2]


def decide(
    policy: str,
    pods: Sequence[PodView],
    pod: int,
    scores: Sequence[float] = (),
    parts: Parts = (),
    predicted_ttft_s: float | None = None,
    rival: Rival | None = None,
) -> Decision:
    """Return the decision for `pods[pod]`; give `scores` and their `parts` only if the caller asked for them."""
    explained: tuple[PodScore, ...] = ()
    if scores:
        explained = tuple(
            PodScore(view.pod_id, score, dict(parts[i]) if parts else {})
            for i, (view, score) in enumerate(zip(pods, scores, strict=True))
        )
    return Decision(pod, policy, pods[pod].matched_tokens, predicted_ttft_s, explained, rival)
