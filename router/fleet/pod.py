"""One life of one engine, as this gateway sees it."""

from __future__ import annotations

import itertools
from types import TracebackType

from router.fleet.probe import PodIdentity
from router.routing.pod_state import PodState
from router.routing.types import PodId


class Pod:
    """A pod between two restarts. `in_flight` counts this gateway's open requests on it."""

    __slots__ = ("epoch", "identity", "in_flight", "model", "pod_id", "state", "url")

    def __init__(self, url: str, identity: PodIdentity) -> None:
        self.url = url
        self.identity = identity
        self.pod_id: PodId = identity.pod_id
        self.epoch = identity.epoch
        self.model = identity.models[0].name
        """The first model it lists: the one its registry entries are filed under."""
        self.state = PodState()
        self.in_flight = 0

    def __repr__(self) -> str:
        return f"<Pod {self.pod_id} {self.url} epoch={self.epoch} in_flight={self.in_flight}>"

    def same_life(self, identity: PodIdentity) -> bool:
        """Whether `identity` is this pod, not restarted."""
        return identity.pod_id == self.pod_id and identity.epoch == self.epoch


_request_numbers = itertools.count


class Lease:
    """A request on a pod, counted from `with` to the end of its block, however it ends. Made by `Fleet.lease`."""

    __slots__ = ("_clock", "_output_tokens", "_pod", "_prompt_tokens", "_request_id", "_uncached_tokens")
