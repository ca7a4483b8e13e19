"""Shadow policies: what other policies would have chosen, counted beside what was done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from router.routing.predicted_ttft import PredictedTtft
from router.routing.types import Decision, PodView, Policy, RequestInfo
from router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class Shadows:
    """Policies that are asked about live requests and decide nothing.

    Each keeps a memory of its own, as if its choices had been followed, for each model. What it sees of caches and
    loads is what the acting policy made of them. So it tells what it would decide at this moment, not what the fleet
    would be like under it.
    """

    def __init__(
        self, names: Sequence[str], make_policies: Callable[[], Mapping[str, Policy]], metrics: Metrics
    ) -> None:
        """`make_policies`: every policy by name, new, `predicted_ttft` among them."""
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
        pods: Sequence[PodView],
        in_force: Callable[[str], str],
    ) -> None:
        """Count what each shadow policy makes of a request that `acting` has decided. A policy that fails is counted.

        `pods`: what `acting` chose from. `in_force`: the policy that stands in for one that cannot be used now.
        """
        started_s = time.perf_counter()
        policies = self._policies.get(model)
        if policies is None:
            policies = self._policies[model] = self._make_policies()
        ttfts_s: Sequence[float] = ()
        for name in self._names:
            try:
                chosen = policies[in_force(name)].choose(request, pods).pod
                ttfts_s = ttfts_s or _ttfts_s(policies, request, pods)
                self._metrics.shadowed(
                    acting.policy,
                    name,
                    is_same=chosen == acting.pod,
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=(pods[acting.pod].matched_tokens, pods[chosen].matched_tokens),
                    ttft_s=(ttfts_s[acting.pod], ttfts_s[chosen]),
                )
            except Exception:  # the request has its pod, whatever is wrong here
                self._metrics.shadow_failed(acting.policy, name)
                if name not in self._logged:
                    self._logged.add(name)
                    log.exception("shadow policy %s failed; from now on its failures are only counted", name)
        self._metrics.compared_shadows(time.perf_counter() - started_s)


def _ttfts_s(policies: Mapping[str, Policy], request: RequestInfo, pods: Sequence[PodView]) -> Sequence[float]:
    """Predicted seconds to the first token on each pod: one estimate for all policies, most of which have none."""
    predictor = policies["predicted_ttft"]
    assert isinstance(predictor, PredictedTtft)
    return predictor.ttfts_s(request, pods)
