"""What a failed attempt means: the pod is at fault, the pod says that it leaves, or the request is at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import replace

from router.engines.outcome import Outcome
from router.fleet.faults import Fault
from router.fleet.fleet import Fleet
from router.forwarding.attempt import Attempt
from router.forwarding.exchange import Exchange
from router.reading.inbound import Inbound
from router.telemetry.metrics import Metrics
from router.views.types import PodId

TELLING_BYTES = 4096
"""Bytes at the end of a body that tell requests apart."""


class Blame:
    """Reports failed attempts to the fleet."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time

    def failed(self, exchange: Exchange, inbound: Inbound, attempt: Attempt) -> None:
        """Record an attempt that failed before the client saw anything, so another pod is tried."""
        assert attempt.error is not None
        assert attempt.outcome is not None
        exchange.error = attempt.error.detail
        self._metrics.attempts.retried(attempt.reason)
        if attempt.outcome is Outcome.FULL:
            attempt.pod.cap.refused(attempt.pod.in_flight, self._clock())
        if attempt.outcome is Outcome.UNREACHABLE:
            self._fleet.failed(attempt.pod, attempt.error.detail)
        self._told(attempt, attempt.outcome, attempt.error.detail)
        if attempt.outcome.is_blamed:
            attempt.pod.faults.doubt()
            attempt.fault = self._fault(attempt, inbound)

    def without_body(self, inbound: Inbound) -> Inbound:
        """Return the request with only the end of its body, for use once the body is sent and not needed again."""
        return replace(inbound, body=inbound.body[-TELLING_BYTES:])

    def failed_at_proxy(self, inbound: Inbound, attempt: Attempt, outcome: Outcome, why: str) -> None:
        """Record a failed attempt that another proxy sent to the pod. Nothing here retries it."""
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
        """Record a stream that ended wrongly after its first byte."""
        attempt.outcome = outcome
        self._told(attempt, outcome, why)
        if outcome.is_blamed:
            self._fleet.blame(attempt.pod, self._fault(attempt, inbound), is_begun=True)

    def settle(self, exchange: Exchange, *, is_made_good: bool = False) -> None:
        """Blame the pod that failed the request. If several failed it, the request is at fault, and none is blamed.

        `is_made_good`: see Fault.
        """
        faults = [(attempt.pod, attempt.fault) for attempt in exchange.attempts if attempt.fault is not None]
        if not faults:
            return
        exchange.forget_faults()
        if len(faults) == 1:
            ((pod, fault),) = faults
            self._fleet.blame(pod, replace(fault, is_made_good=is_made_good), is_begun=False)

    def to_avoid(self, inbound: Inbound, tried: Set[PodId]) -> Set[PodId]:
        """Return `tried` and, for a retry, the pods in doubt. If that leaves no pod, return only `tried`.

        If n pods are broken, at most n requests fail at two pods each: after that, all broken pods but one are in
        doubt.
        """
        if not tried:
            return tried
        avoided = tried | self._fleet.doubtful(inbound.model)
        return avoided if any(pod.pod_id not in avoided for pod in self._fleet.pods(inbound.model)) else tried

    def _told(self, attempt: Attempt, outcome: Outcome, why: str) -> None:
        """Tell the fleet what the pod said of itself."""
        if outcome.is_leaving:
            self._fleet.leaves(attempt.pod, why)
        elif outcome is Outcome.ABORTED:
            attempt.pod.faults.doubt()
            self._fleet.look_at(attempt.pod)  # it may have gone to sleep

    def _fault(self, attempt: Attempt, inbound: Inbound) -> Fault:
        """Return the attempt as a fault of its pod."""
        return Fault(hash(inbound.body[-TELLING_BYTES:]), attempt.sent_s, self._clock())
