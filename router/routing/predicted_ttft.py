"""`predicted_ttft`: chooses the pod with the least time to first token plus delay to other requests."""

from __future__ import annotations

from router.routing import replication, ties
from router.routing.fetching import reaching
from router.routing.recent import RecentWork
from router.routing.regret import rival_of
from router.routing.terms import Estimate, Usual
from router.views.latency import prefill_s
from router.views.pick import decide
from router.views.table import CandidatePods, Floats
from router.views.types import Decision, PodId, RequestInfo

_SHARED = 0.1
"""Traffic counts as sharing if some pod holds this share of a prompt on average."""
_FOLLOW = 0.02
"""Weight of a request in that average."""
_RECENT_HALF_LIFE_S = 60.0
"""About the time in which an unused prefix leaves a busy cache."""


class PredictedTtft:
    """Scores each pod in seconds by the terms of `terms.py`, and settles ties by the rules of `ties.py`."""

    name = "predicted_ttft"

    def __init__(self) -> None:
        self._ledger = replication.Ledger()
        self._recent = RecentWork(_RECENT_HALF_LIFE_S)
        self._usual = Usual()
        self._shared = 2 * _SHARED
        """Mean shared part of a prompt; traffic counts as sharing until some 35 requests say otherwise."""

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        pods = reaching(pods)
        lacking = replication.pods_lacking(request, pods)
        prefix = self._ledger.prefix(request, pods.longest)
        owed_s = 0.0 if prefix is None else self._ledger.owed_s(prefix, request.now_s, lacking)
        at = Estimate(request, pods, self._usual, owed_s)
        ttft_s = at.ttft_s()
        scores = at.scores(ttft_s)
        tie = ties.Tie(at, scores, int(scores.argmin()), self._shared >= _SHARED, self._recent)
        row = ties.settle(tie)
        found_s, rival = float(ttft_s[row]), rival_of(ttft_s, at.prefill_s, row)
        if explain:
            left_out_by = ties.left_out_by(tie)
            return decide(self.name, pods, row, scores, at.parts(), left_out_by, ttft_s=found_s, rival=rival)
        if prefix is not None:
            held_less = pods.matched_by(row) < pods.longest
            owed_s = replication.owed_after(at, scores, row)
            self._ledger.book(prefix, owed_s, request.now_s, (lacking or 0) - held_less)
        self._remember(request, pods, row)
        return decide(self.name, pods, row, ttft_s=found_s, rival=rival)

    def _remember(self, request: RequestInfo, pods: CandidatePods, row: int) -> None:
        """Note that the request goes to the pod."""
        prompt, cost = request.prompt_tokens, pods.table.costs[row]
        self._shared += _FOLLOW * (pods.longest / prompt - self._shared)
        self._usual.saw(prefill_s(cost, prompt, prompt), prefill_s(cost, max(1, prompt - pods.longest), prompt))
        uncached = max(1, prompt - pods.matched_by(row))
        self._recent.add(pods.table.ids[row], uncached + request.output_tokens, request.now_s)

    def sent_elsewhere(self, pod_id: PodId, tokens: int, now_s: float) -> None:
        """Count a request that another gateway sent to the pod, with `tokens` to compute."""
        self._recent.add(pod_id, tokens, now_s)

    def ttfts_s(self, request: RequestInfo, pods: CandidatePods) -> Floats:
        """Return the seconds to the first token on each pod, as `choose` predicts them. Requests seen before play no
        part, and the call changes no state."""
        return Estimate(request, reaching(pods), self._usual).ttft_s()
