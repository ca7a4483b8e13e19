"""Shadow policies: count what other policies would have chosen, beside what was done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from router.routing.predicted_ttft import PredictedTtft
from router.telemetry.metrics import Metrics
from router.views.table import CandidatePods, Floats, Policy
from router.views.types import Decision, RequestInfo

log = logging.getLogger(__name__)


class Shadows:
    """Policies that are asked about live requests and decide nothing.

    For each model, each policy keeps its own memory, as if its choices had been followed. But the caches and loads that
    it sees result from the acting policy. So a policy shows what it would decide at this moment, not what the fleet
    would be like under it.
    """

    def __init__(
        self, names: Sequence[str], make_policies: Callable[[], Mapping[str, Policy]], metrics: Metrics
    ) -> None:
        """`make_policies`: returns new policies by name, `predicted_ttft` among them."""
        self._names = names
        self._make_policies = make_policies
        self._policies: dict[str, Mapping[str, Policy]] = {}
        self._metrics = metrics
        self._logged: set[str] = set()

    def compare(
        self,
        model: str,
        acting: Decision,
        request: RequestInfo,
        pods: CandidatePods,
        in_force: Callable[[str], str],
    ) -> None:
        """Count what each shadow policy would choose for a request that `acting` has decided. Failures are counted too.

        `pods`: the pods that `acting` chose from. `in_force` maps a policy that cannot be used now to its substitute.
        """
        started_s = time.perf_counter()
        policies = self._policies.get(model)
        if policies is None:
            policies = self._policies[model] = self._make_policies()
        ttfts_s: Floats | None = None
        for name in self._names:
            try:
                chosen = policies[in_force(name)].choose(request, pods).pod
                ttfts_s = _ttfts_s(policies, request, pods) if ttfts_s is None else ttfts_s
                self._metrics.shadows.chose(
                    acting.policy,
                    name,
                    is_same=chosen == acting.pod,
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=(pods.matched_by(acting.pod), pods.matched_by(chosen)),
                    ttft_s=(float(ttfts_s[acting.pod]), float(ttfts_s[chosen])),
                )
            except Exception:  # the request has its pod already, so no error here may stop it
                self._metrics.shadows.failed(acting.policy, name)
                if name not in self._logged:
                    self._logged.add(name)
                    log.exception("shadow policy %s failed; from now on its failures are only counted", name)
        self._metrics.shadows.took(time.perf_counter() - started_s)


def _ttfts_s(policies: Mapping[str, Policy], request: RequestInfo, pods: CandidatePods) -> Floats:
    """Return the seconds to the first token on each pod, by `predicted_ttft`: few other policies predict them."""
    predictor = policies["predicted_ttft"]
    assert isinstance(predictor, PredictedTtft)
    return predictor.ttfts_s(request, pods)
