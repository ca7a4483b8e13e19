"""Where requests go, among the endpoints that the proxy allows. The chooser places requests with keys. Requests
without keys go to the least loaded pod."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.contract.errors import Unavailable
from engine.contract.requests import Endpoint
from router.edge.errors import RETRY_AFTER_S
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.picker.protocol import endpoint_of, names
from router.tenants.tenant import Tenant
from router.views.types import PodId


class NoneAllowed(Unavailable):
    """503: none of the endpoints that the proxy allows takes requests."""

    def __init__(self) -> None:
        super().__init__(
            "none of the endpoints that the proxy allows takes requests", code="no_engine", retry_after_s=RETRY_AFTER_S
        )


def endpoint_of_pod(pod: Pod) -> str:
    """Return `ip:port` of a pod."""
    return endpoint_of(pod.targets[Endpoint.CHAT])


def outside(pods: Sequence[Pod], allowed: frozenset[str] | None) -> frozenset[PodId]:
    """Return the pods that are not `allowed`. Raises NoneAllowed if none is allowed."""
    if allowed is None:
        return frozenset()
    others = frozenset(pod.pod_id for pod in pods if not names(allowed, endpoint_of_pod(pod)))
    if pods and len(others) == len(pods):
        raise NoneAllowed
    return others


def fallbacks(pods: Sequence[Pod], first: Pod, most: int) -> list[str]:
    """Return the endpoints to try after that of `first`, the least loaded first.

    Only endpoints that take the request unchanged count: with the same key of the gateway and without a rank.
    """
    others = [pod for pod in pods if pod.url != first.url and pod.key == first.key and pod.rank is None]
    others.sort(key=lambda pod: pod.in_flight / pod.weight)
    return list(dict.fromkeys(map(endpoint_of_pod, others)))[:most]


class ByLoad:
    """Picks pods for requests whose body the picker does not read: forms, and bodies that the proxy does not show."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def pick(self, tenant: Tenant, allowed: frozenset[str] | None) -> tuple[Pod, Sequence[Pod]]:
        """Return the least loaded pod, and all allowed pods, among those of which the tenant may use every model: the
        body may name any of them. Raises Unavailable.
        """
        pods = [pod for pod in self._fleet.admitted() if all(tenant.may_use(m.name) for m in pod.identity.models)]
        others = outside(pods, allowed)
        able = [pod for pod in pods if pod.pod_id not in others]
        if not able:
            raise Unavailable("no engine is up", code="no_engine", retry_after_s=RETRY_AFTER_S)
        least = min(pod.in_flight / pod.weight for pod in able)
        return random.choice([pod for pod in able if pod.in_flight / pod.weight <= least]), able
