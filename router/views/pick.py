"""From scores to a decision: what every policy shares."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from router.views.table import CandidatePods, Floats, Ints, Seconds
from router.views.types import Decision, PodScore, RequestInfo, Rival


def lowest(request: RequestInfo, pods: CandidatePods, scores: Floats) -> int:
    """Return the row with the lowest score; `by_hash` breaks ties."""
    best = (scores == scores.min()).nonzero()[0]
    return int(best[0]) if len(best) == 1 else by_hash(request, pods, best)


def by_hash(request: RequestInfo, pods: CandidatePods, rows: Ints) -> int:
    """Return one of `rows` by a rendezvous hash of the request's session or deepest key: equal prompts go to one pod,
    and unlike prompts are spread."""
    if request.session:
        seed = request.session
    else:
        seed = request.keys[-1] if request.keys else xxh3_64_intdigest(struct.pack("<d", request.now_s))
    ids = pods.table.ids
    chosen: int = max([(xxh3_64_intdigest(ids[row].encode(), seed), ids[row], row) for row in rows.tolist()])[2]
    return chosen


def requests_per_weight(pods: CandidatePods, bound: float) -> float:
    """Return how many requests a pod of weight 1 may have: `bound` times its share, with the new request counted."""
    in_flight, weight = float(pods.columns.in_flight.sum()), float(sum(pods.columns.weight.tolist()))
    return bound * (in_flight + 1) / weight


def decide(
    policy: str,
    pods: CandidatePods,
    row: int,
    scores: Floats | None = None,
    parts: Mapping[str, Seconds] | None = None,
    left_out_by: Sequence[str] = (),
    *,
    ttft_s: float | None = None,
    rival: Rival | None = None,
) -> Decision:
    """Return the decision for the pod in `row`. Give `scores`, their `parts`, and the rules that left out pods only if
    the caller asked for them."""
    explained = () if scores is None else _explained(pods, scores, parts or {}, left_out_by)
    return Decision(row, policy, pods.matched_by(row), ttft_s, explained, rival)


def _explained(
    pods: CandidatePods, scores: Floats, parts: Mapping[str, Seconds], left_out_by: Sequence[str]
) -> tuple[PodScore, ...]:
    """Return every pod's score with its parts by name."""
    count = len(pods.table)
    listed = {name: [part] * count if isinstance(part, float) else part.tolist() for name, part in parts.items()}
    rules = left_out_by or [""] * count
    return tuple(
        PodScore(pod_id, score, {name: part[row] for name, part in listed.items()}, rules[row])
        for row, (pod_id, score) in enumerate(zip(pods.table.ids, scores.tolist(), strict=True))
    )
