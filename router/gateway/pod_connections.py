"""What becomes of connections to a pod when it comes, and when it goes to sleep."""

from __future__ import annotations

from engine.contract.requests import Endpoint
from router.fleet.fleet import Fleet, FleetChange
from router.fleet.pod import Pod
from router.gateway.engine_client import EngineClient


class PodConnections:
    """Listens to the fleet."""

    def __init__(self, fleet: Fleet, client: EngineClient) -> None:
        self._fleet = fleet
        self._client = client
        self._admitted: frozenset[Pod] = frozenset()
        fleet.listen(self._changed)
        fleet.listen_for_sleep(self._give_up)

    def _changed(self, change: FleetChange) -> None:
        """To pods that begin to take requests a few are opened before the first burst comes."""
        admitted = frozenset(self._fleet.admitted())
        self._client.expect([pod.targets[Endpoint.CHAT] for pod in admitted - self._admitted])
        self._admitted = admitted

    def _give_up(self, pod: Pod) -> None:
        """What a pod that sleeps has not begun to answer goes to another one, where there is one."""
        if any(self._fleet.pods(model.name) for model in pod.identity.models):
            for target in pod.targets.values():
                self._client.give_up(target)
