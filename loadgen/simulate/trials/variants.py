"""`predicted_ttft` with a part left out, or what it estimates made exact: what is each worth?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.omniscient import exact_cost
from loadgen.simulate.pod import Report
from router.routing.pick import lowest
from router.routing.policies import PolicyOptions
from router.routing.predicted_ttft import Costs, PredictedTtft
from router.routing.types import PodView, RequestInfo

DEFAULTS = PolicyOptions()


P = TypeVar("P", bound=PredictedTtft)


def predicted(kind: type[P], options: PolicyOptions = DEFAULTS) -> P:
    """A policy of that class, with the options of the production one."""
    return kind(
        host_share=options.host_share,
        disk_share=options.disk_share,
        pressure_weight=options.pressure_weight,
        stall_weight=options.stall_weight,
        switch_margin=options.switch_margin,
        same_speed=options.same_speed,
    )


class WithoutExternality(PredictedTtft):
    """What a request does to those behind it does not count."""

    def _costs(
        self,
        request: RequestInfo,
        pods: Sequence[PodView],
        longest_match: int,
        owed_s: float,
        *,
        explain: bool = False,
    ) -> Costs:
        costs = super()._costs(request, pods, longest_match, owed_s, explain=True)
        costs.scores = [score - parts["externality_s"] for score, parts in zip(costs.scores, costs.parts, strict=True)]
        return costs


class WithoutDebt(PredictedTtft):
    """No copy of a prefix but where it suits the request at hand."""

    def _costs(
        self,
        request: RequestInfo,
        pods: Sequence[PodView],
        longest_match: int,
        owed_s: float,
        *,
        explain: bool = False,
    ) -> Costs:
        return super()._costs(request, pods, longest_match, 0.0, explain=explain)


class WithoutRecent(PredictedTtft):
    """Of pods equally good the one of the lowest score, however little lower."""

    def _choose_equal(self, request: RequestInfo, pods: Sequence[PodView], costs: Costs) -> int:
        return lowest(request, pods, costs.scores)


class ExactCost(Gateway):
    """Pods report the constants of their profile in place of learnt ones."""

    def __init__(self, simulation: Simulation, stride: int) -> None:
        super().__init__("predicted_ttft", simulation.timeline, stride=stride)
        self._pods = simulation.pods

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`."""
        cost = exact_cost(self._pods[pod].spec.profile, self._pods[pod].speed)
        super().reported(pod, replace(report, load=replace(report.load, cost=cost)), now_s)
