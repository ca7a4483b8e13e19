"""Collect what this gateway has learnt of models and pods for other gateways, and use what they have learnt."""

from __future__ import annotations

from collections.abc import Iterable

from router.fleet.fleet import Fleet
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.registry.learnt import Learnt, LearntRoom
from router.views.speeds import LearntFactor, LearntSpeed
from router.views.types import PodId


class LearntValues:
    """A `LearntSource`."""

    def __init__(self, fleet: Fleet, estimates: Estimates, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._estimates = estimates
        self._index = index

    def models(self) -> Iterable[str]:
        """See LearntSource."""
        return self._fleet.engines_by_model()

    def learnt(self, model: str) -> Learnt | None:
        """See LearntSource. Takes time proportional to the model's pods."""
        pods = [pod for pod in self._fleet.pods(model) if pod.model == model]
        speeds: dict[str, LearntSpeed] = {}
        factors: dict[PodId, LearntFactor] = {}
        rooms: dict[PodId, LearntRoom] = {}
        for pod in pods:
            speed = pod.state.speed
            if speed.pool.engine not in speeds and (pool := speed.pool.learnt) is not None:
                speeds[speed.pool.engine] = pool
            if (factor := speed.learnt) is not None:
                factors[pod.pod_id] = factor
            if (room := self._index.learnt_room(pod.pod_id)) is not None:
                rooms[pod.pod_id] = LearntRoom(*room)
        tokens = self._estimates.of(model).learnt
        return Learnt(tokens, speeds, factors, rooms) if tokens or speeds or rooms else None

    def expect(self, model: str, learnt: Learnt) -> None:
        """See LearntSource. Call it before the gateway knows any pod."""
        if learnt.tokens is not None:
            self._estimates.begin_with(model, learnt.tokens)
        self._fleet.speeds.expect(model, learnt.speeds, learnt.factors)
        self._index.expect_rooms({pod: (room.capacity_tokens, room.told_tokens) for pod, room in learnt.rooms.items()})
