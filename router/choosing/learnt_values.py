"""Collect what this gateway has learnt of models and pods for other gateways, and use what they have learnt."""

from __future__ import annotations

from collections.abc import Iterable

from engine.contract.redis_keys import LEARNT_KEY
from router.fleet.fleet import Fleet
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.registry.learnt import Learnt, LearntCapacity, decode_learnt, encode_learnt
from router.views.speeds import LearntFactor, LearntSpeed
from router.views.types import PodId


class LearntValues:
    """A `ValueKind`: one Redis hash, with a record for each model. All gateways see the same pods, and each began with
    what the earlier ones knew, so the last writer's record counts."""

    name = "what answers have taught"
    first_s = 0.5
    every_s = 5.0
    kept_s = 3600  # after that the machines may do other things
    is_followed = False

    def __init__(self, fleet: Fleet, estimates: Estimates, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._estimates = estimates
        self._index = index

    def hashes(self) -> Iterable[str]:
        """See ValueKind."""
        return (LEARNT_KEY,)

    def own(self, name: str, now_s: float) -> Iterable[tuple[str, Learnt]]:
        """See ValueKind. Each step takes time proportional to the model's pods."""
        for model in list(self._fleet.engines_by_model()):
            if (learnt := self._learnt(model)) is not None:
                yield model, learnt

    def encode(self, value: Learnt, written_s: float) -> bytes:
        """See ValueKind."""
        return encode_learnt(value, written_s)

    def decode(self, data: bytes) -> tuple[Learnt, float]:
        """See ValueKind."""
        return decode_learnt(data)

    def use(self, name: str, field: str, value: Learnt, written_s: float) -> None:
        """See ValueKind. Call it before the gateway knows any pod."""
        if value.tokens is not None:
            self._estimates.begin_with(field, value.tokens)
        self._fleet.speeds.expect(field, value.speeds, value.factors)
        self._index.expect_capacities(
            {pod: (cache.capacity_tokens, cache.told_tokens) for pod, cache in value.capacities.items()}
        )

    def _learnt(self, model: str) -> Learnt | None:
        pods = [pod for pod in self._fleet.pods(model) if pod.model == model]
        speeds: dict[str, LearntSpeed] = {}
        factors: dict[PodId, LearntFactor] = {}
        capacities: dict[PodId, LearntCapacity] = {}
        for pod in pods:
            speed = pod.state.speed
            if speed.pool.engine not in speeds and (pool := speed.pool.learnt) is not None:
                speeds[speed.pool.engine] = pool
            if (factor := speed.learnt) is not None:
                factors[pod.pod_id] = factor
            if (capacity := self._index.learnt_capacity(pod.pod_id)) is not None:
                capacities[pod.pod_id] = LearntCapacity(*capacity)
        tokens = self._estimates.of(model).learnt
        return Learnt(tokens, speeds, factors, capacities) if tokens or speeds or capacities else None
