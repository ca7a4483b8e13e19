"""The trials by name, for `--arms` of `python -m loadgen.simulate.study`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.routing import Router
from loadgen.simulate.trials.holding import Holding, HoldingShortestFirst
from loadgen.simulate.trials.moving import Moving
from loadgen.simulate.trials.replicating import ByShare, ByShareAndDebt, replicating
from loadgen.simulate.trials.variants import (
    DEFAULTS,
    ExactCost,
    WithoutDebt,
    WithoutExternality,
    WithoutRecent,
    predicted,
)
from router.routing.policies import PolicyOptions
from router.routing.predicted_ttft import PredictedTtft

Make = Callable[[Simulation, int], Router]
"""Of the simulation and the stride."""


def _variant(kind: type[PredictedTtft], options: PolicyOptions = DEFAULTS) -> Make:
    return lambda simulation, stride: Gateway(
        "predicted_ttft", simulation.timeline, stride=stride, made=predicted(kind, options)
    )


def _replicating(kind: type[ByShare]) -> Make:
    return lambda simulation, stride: Gateway(
        "predicted_ttft", simulation.timeline, stride=stride, made=replicating(kind)
    )


def _options(options: PolicyOptions) -> Make:
    return _variant(PredictedTtft, options)


TRIALS: Mapping[str, Make] = MappingProxyType(
    {
        "trial_hold": Holding,
        "trial_hold_shortest": HoldingShortestFirst,
        "trial_replicate": _replicating(ByShare),
        "trial_replicate_debt": _replicating(ByShareAndDebt),
        "trial_move_25": lambda simulation, stride: Moving(simulation, stride, 25e9),
        "trial_move_3": lambda simulation, stride: Moving(simulation, stride, 3e9),
        "no_externality": _variant(WithoutExternality),
        "no_debt": _variant(WithoutDebt),
        "no_recent": _variant(WithoutRecent),
        "no_same_speed": _options(replace(DEFAULTS, same_speed=0.0)),
        "no_margin": _options(replace(DEFAULTS, switch_margin=0.0)),
        "margin_10": _options(replace(DEFAULTS, switch_margin=0.1)),
        "no_stall": _options(replace(DEFAULTS, stall_weight=0.0)),
        "stall_02": _options(replace(DEFAULTS, stall_weight=0.02)),
        "no_pressure": _options(replace(DEFAULTS, pressure_weight=0.0)),
        "no_speculation": lambda simulation, stride: Gateway(
            "predicted_ttft", simulation.timeline, stride=stride, speculation_ttl_s=0.0
        ),
        "exact_cost": ExactCost,
    }
)
