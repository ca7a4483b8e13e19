"""What a failed attempt means for its pod: a fault of it, a word of its own that it leaves, or the request's doing."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import replace

from router.fleet.faults import Fault
from router.fleet.fleet import Fleet
from router.gateway.attempt import Attempt
from router.gateway.exchange import Exchange
from router.gateway.inbound import Inbound
from router.gateway.outcome import Outcome
from router.routing.types import PodId
from router.telemetry.metrics import Metrics

TELLING_BYTES = 4096
"""At the end of a body, which tell requests apart."""


class Blame:
    """Tells the fleet of failed attempts."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time

    def failed(self, exchange: Exchange, inbound: Inbound, attempt: Attempt) -> None:
        """It came to nothing before the client saw anything, and another pod is to make it good."""
        assert attempt.error is not None
        assert attempt.outcome is not None
        exchange.error = attempt.error.detail
        self._metrics.retried(attempt.reason)
        if attempt.outcome is Outcome.FULL:
            attempt.pod.cap.refused(attempt.pod.in_flight, self._clock())
        if attempt.outcome is Outcome.UNREACHABLE:
            self._fleet.failed(attempt.pod, attempt.error.detail)
        self._told(attempt, attempt.outcome, attempt.error.detail)
        if attempt.outcome.is_blamed:
            attempt.pod.faults.doubt()
            attempt.fault = self._fault(attempt, inbound)

    def without_body(self, inbound: Inbound) -> Inbound:
        """The request without what is not needed to tell it from others, once its body has gone on for good."""
        return replace(inbound, body=inbound.body[-TELLING_BYTES:])

    def ended_ill(self, inbound: Inbound, attempt: Attempt, outcome: Outcome, why: str) -> None:
        """It came to nothing at the pod, and nobody here makes it good: another proxy sent it there."""
        attempt.outcome = outcome
        if outcome is Outcome.FULL:
            attempt.pod.cap.refused(attempt.pod.in_flight, self._clock())
        if outcome is Outcome.UNREACHABLE:
            self._fleet.failed(attempt.pod, why)
        self._told(attempt, outcome, why)
        if outcome.is_blamed:
            attempt.pod.faults.doubt()
            self._fleet.blame(attempt.pod, self._fault(attempt, inbound), is_begun=False)

    def broke(self, inbound: Inbound, attempt: Attempt, outcome: Outcome, why: str) -> None:
        """The stream ended wrongly after its first byte."""
        attempt.outcome = outcome
        self._told(attempt, outcome, why)
        if outcome.is_blamed:
            self._fleet.blame(attempt.pod, self._fault(attempt, inbound), is_begun=True)

    def settle(self, exchange: Exchange, *, is_made_good: bool = False) -> None:
        """Blame the pod that failed the request; of several none: then it is the request. `is_made_good`: see Fault."""
        faults = [(attempt.pod, attempt.fault) for attempt in exchange.attempts if attempt.fault is not None]
        if not faults:
            return
        exchange.forget_faults()
        if len(faults) == 1:
            ((pod, fault),) = faults
            self._fleet.blame(pod, replace(fault, is_made_good=is_made_good), is_begun=False)

    def to_avoid(self, inbound: Inbound, tried: Set[PodId]) -> Set[PodId]:
        """Pods that `tried` it, and for a further attempt those in doubt, unless there is no other.

        So with several broken pods a request meets two of them at most once for each: then all but one are in doubt.
        """
        if not tried:
            return tried
        avoided = tried | self._fleet.doubtful(inbound.model)
        return avoided if any(pod.pod_id not in avoided for pod in self._fleet.pods(inbound.model)) else tried

    def _told(self, attempt: Attempt, outcome: Outcome, why: str) -> None:
        """What the pod said of itself."""
        if outcome.is_leaving:
            self._fleet.leaves(attempt.pod, why)
        elif outcome is Outcome.ABORTED:
            attempt.pod.faults.doubt()
            self._fleet.look_at(attempt.pod)  # it may have gone to sleep

    def _fault(self, attempt: Attempt, inbound: Inbound) -> Fault:
        """The attempt as a failure of its pod."""
        return Fault(hash(inbound.body[-TELLING_BYTES:]), attempt.sent_s, self._clock())
