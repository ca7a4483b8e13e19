"""Where requests go, among the endpoints that the proxy allows. The chooser places requests with keys. Requests
without keys go to the least loaded pod."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import orjson

from engine.contract.bounded_json import loads
from engine.contract.errors import Unavailable
from engine.contract.requests import Endpoint
from router.edge.errors import RETRY_AFTER_S
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.forwarding.waiting import WaitingRoom
from router.picker.protocol import endpoint_of, names
from router.reading.names import not_allowed
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
    """Picks pods for requests without keys: those to unknown endpoints, and those without a body."""

    def __init__(self, fleet: Fleet, room: WaitingRoom) -> None:
        self._fleet = fleet
        self._room = room

    def pick(self, body: bytes, tenant: Tenant | None, allowed: frozenset[str] | None) -> tuple[Pod, Sequence[Pod]]:
        """Return the least loaded pod, and all allowed pods, of the model that a JSON body names. If the body
        names no model with a pod, return those of all models that the tenant may use.

        `tenant`: whose rights count; None: nobody's, because the request computes nothing. Raises Forbidden and
        Unavailable.
        """
        model = _model_of(body)
        if tenant is not None and model is not None and not tenant.may_use(model):
            raise not_allowed(model)
        full: Collection[PodId] = ()
        pods: Sequence[Pod] = self._fleet.pods(model) if model is not None else ()
        if pods and model is not None:
            full = self._room.full(model) or ()
        else:
            pods = self._fleet.admitted()
            if tenant is not None:
                pods = [pod for pod in pods if any(tenant.may_use(served.name) for served in pod.identity.models)]
        others = outside(pods, allowed)
        able = [pod for pod in pods if pod.pod_id not in others]
        if not able:
            raise Unavailable("no engine is up", code="no_engine", retry_after_s=RETRY_AFTER_S)
        best = [pod for pod in able if pod.pod_id not in full] or able
        least = min(pod.in_flight / pod.weight for pod in best)
        return random.choice([pod for pod in best if pod.in_flight / pod.weight <= least]), able


def _model_of(body: bytes) -> str | None:
    try:
        fields = loads(body) if body else None
    except orjson.JSONDecodeError:
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None
