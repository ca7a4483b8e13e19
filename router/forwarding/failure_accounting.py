"""Act on the result of an attempt: count it for its pod, for the retry budget, in the index and in the metrics.

A failure before the client saw anything is the pod's fault only if another pod answers the request. If several pods
fail it, the request is at fault. So the fault is kept in the record until that is known.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import assert_never

from router.choosing.chooser import Choice, Chooser
from router.edge.errors import UpstreamError
from router.engines.attempt_result import Broken, Cause, Done, GoesOn, Refused, Retry
from router.fleet.faults import Fault
from router.fleet.fleet import Fleet
from router.forwarding.exchange import DIGEST_BYTES, Attempt, Exchange
from router.overload.retries import RetryBudget
from router.reading.inbound import Inbound
from router.telemetry.metrics import Metrics


class FailureAccounting:
    """Counts attempts of all requests, whether this gateway or another proxy sends them."""

    def __init__(self, fleet: Fleet, chooser: Chooser, metrics: Metrics) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._metrics = metrics
        self._retries = RetryBudget()
        self._clock = asyncio.get_running_loop().time

    def may_retry(self, inbound: Inbound, choice: Choice, in_flight: int) -> bool:
        """Return whether the retry budget allows one more attempt, which it then counts. If not, undo its choice.

        `in_flight`: all requests.
        """
        if self._retries.take(in_flight):
            return True
        self._chooser.undo(inbound, choice)
        self._metrics.attempts.retry_refused()
        return False

    def began(self, exchange: Exchange, attempt: Attempt, now_s: float) -> None:
        """Count that the pod begins to answer well. So a pod that failed the request before was at fault."""
        attempt.first_byte_s = now_s
        self._end_retry(attempt)
        attempt.pod.faults.began(now_s)
        if len(exchange.attempts) > 1:
            self.settle(exchange, is_made_good=True)

    def ended(self, exchange: Exchange, attempt: Attempt) -> None:
        """Count an attempt that no longer counts as load. One that never ran is undone in the index."""
        attempt.ended(self._clock())
        self._end_retry(attempt)
        self.undo(attempt)
        match attempt.result:
            case None | GoesOn():  # it was cancelled, or the client left
                pass
            case Done():
                self._fleet.served(attempt.pod, sent_s=attempt.sent_s)
            case Refused():
                _forget_faults(exchange)  # the request is wrong: no pod is to blame
            case Retry(cause, reason):
                why = _why(attempt)
                exchange.failed(why)
                self._metrics.attempts.retried(reason)
                self._failed(attempt, cause, why)
                if cause.is_pods_fault:
                    attempt.pod.faults.doubt()
                    attempt.takes_fault(self._fault(attempt))
            case Broken(cause):
                self._broke(exchange, attempt, cause)
            case _:
                assert_never(attempt.result)

    def ended_at_proxy(self, exchange: Exchange, attempt: Attempt, why: str) -> None:
        """Count an attempt that another proxy sent to the pod. Nothing here retries it, so its fault counts at once.

        `why`: why it failed, if it did.
        """
        match attempt.result:
            case None | GoesOn() | Refused():
                pass
            case Done():
                self._fleet.served(attempt.pod, sent_s=attempt.sent_s)
            case Retry(cause):
                exchange.failed(why)
                self._failed(attempt, cause, why)
                if cause.is_pods_fault:
                    attempt.pod.faults.doubt()
                    self._fleet.blame(attempt.pod, self._fault(attempt), is_begun=False)
            case Broken(cause):
                exchange.failed(why)
                self._broke(exchange, attempt, cause)
            case _:
                assert_never(attempt.result)

    def undo(self, attempt: Attempt) -> None:
        """Undo the choice of an attempt that never ran: its prefix no longer counts as held by its pod."""
        if not attempt.has_run:
            attempt.undone(self._chooser.undo(attempt.asked, attempt.choice))

    def settle(self, exchange: Exchange, *, is_made_good: bool = False) -> None:
        """Count the fault of the pod that failed the request. If several failed it, the request is at fault, and no
        pod's fault counts.

        `is_made_good`: see Fault.
        """
        faults = [(attempt.pod, attempt.fault) for attempt in exchange.attempts if attempt.fault is not None]
        if not faults:
            return
        _forget_faults(exchange)
        if len(faults) == 1:
            ((pod, fault),) = faults
            self._fleet.blame(pod, replace(fault, is_made_good=is_made_good), is_begun=False)

    def _failed(self, attempt: Attempt, cause: Cause, why: str) -> None:
        """Count an attempt that failed before the client saw anything."""
        if cause is Cause.FULL:
            attempt.pod.cap.refused(attempt.pod.in_flight, self._clock())
        if cause is Cause.UNREACHABLE:
            self._fleet.failed(attempt.pod, why)
        self._heard(attempt, cause, why)

    def _broke(self, exchange: Exchange, attempt: Attempt, cause: Cause) -> None:
        """Count a stream that ended wrongly after its first byte."""
        self._heard(attempt, cause, exchange.error or "")
        if cause.is_pods_fault:
            self._fleet.blame(attempt.pod, self._fault(attempt), is_begun=True)

    def _heard(self, attempt: Attempt, cause: Cause, why: str) -> None:
        """Tell the fleet what the pod said of itself."""
        if cause.is_leaving:
            self._fleet.leaves(attempt.pod, why)
        elif cause is Cause.ABORTED:
            attempt.pod.faults.doubt()
            self._fleet.look_at(attempt.pod)  # it may have gone to sleep
        elif cause is Cause.NO_ANSWER:
            self._fleet.look_at(attempt.pod)  # it may be another server by now, or serve other models

    def _fault(self, attempt: Attempt) -> Fault:
        """Return the attempt as a fault of its pod."""
        return Fault(hash(attempt.asked.body[-DIGEST_BYTES:]), attempt.sent_s, self._clock())

    def _end_retry(self, attempt: Attempt) -> None:
        """Take the attempt off the retry budget: it has begun to answer, or it has failed."""
        if attempt.is_on_budget:
            attempt.is_on_budget = False
            self._retries.give_back()


def _forget_faults(exchange: Exchange) -> None:
    for attempt in exchange.attempts:
        attempt.takes_fault(None)


def _why(attempt: Attempt) -> str:
    """Return why the attempt failed, for logs."""
    reply = attempt.reply
    if isinstance(reply, UpstreamError):
        return reply.detail
    return "" if reply is None else f"the engine answered {reply.status}"
