"""Overdue first tokens of other gateways' requests: a pod that hangs or has no room is late for all gateways."""

from __future__ import annotations

import math

from router.views.sent import Sent

TOLD_S = 0.15
"""News of a first token comes at most this long after the token. Gateways tell every 0.05 s, 40 gateways every 0.1 s
(`router/peer_sync/pace.py`), and Redis is late at times. If the news comes later still, a pod looks late by the
excess alone."""
LOST_S = 3.0
"""If a first token is overdue by more than this, its gateway is probably gone: gateways tell something every 2 s."""


class OverdueElsewhere:
    """Requests that other gateways sent to one pod and that should have their first token by now."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: dict[str, Sent] = {}
        """The request that was due first comes first."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, request_id: str, request: Sent) -> None:
        """Add a request that should have its first token now."""
        self._requests[request_id] = request

    def remove(self, request_id: str) -> None:
        """Remove a request that has its first token or has left its pod; ignored for an unknown request."""
        self._requests.pop(request_id, None)

    def late_from_s(self, now_s: float, spread: float) -> float:
        """Return the time since which a first token is later than noise of `spread` and transport explain. Infinite if
        no token is awaited, or only from gateways that may be gone."""
        while self._requests:
            request_id, request = next(iter(self._requests.items()))
            if now_s - request.due_s < LOST_S:
                return request.late_from_s(spread, 0.0) + TOLD_S
            del self._requests[request_id]
        return math.inf

    def known_until_s(self) -> float:
        """Return when `late_from_s` changes without a call."""
        for request in self._requests.values():
            return request.due_s + LOST_S
        return math.inf
