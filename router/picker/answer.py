"""What is learnt from an answer that another proxy passes on: which pod gave it, its tokens, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from engine.contract.errors import Unavailable
from router.engines.attempt_result import (
    GOES_ON,
    Began,
    Cause,
    ClientHas,
    ErrorStatus,
    GaveUp,
    GoesOn,
    Observed,
    Retry,
    began,
    ended,
    result_of,
)
from router.engines.engine_errors import is_aborted
from router.engines.upstream import observed_event, observed_status
from router.engines.usage import Tail, header_usage, whole_usage
from router.forwarding.exchange import Attempt, Exchange
from router.picker.destination import endpoint_of_pod
from router.picker.parts import PickerParts

NOT_REACHED = b"upstream connect error or disconnect/reset before headers"
"""Beginning of the body of Envoy's own 503, if a connection failed or broke."""
OF_THE_PROXY = (b"no healthy upstream", b"upstream request timeout", b"no cluster match", b"response timeout")
"""Beginnings of other answers of Envoy's own, which no engine has sent."""


class Answered:
    """One answer, whose headers have come. `add` its body, call `ended` at its end, and `close` in any case."""

    def __init__(self, parts: PickerParts, exchange: Exchange, fields: Mapping[str, str], served: str | None) -> None:
        """`served`: the endpoint that gave it, if the proxy says so."""
        self._parts = parts
        self._exchange = exchange
        self._fields = fields
        self._clock = asyncio.get_running_loop().time
        status = fields.get(":status", "")
        self._status = int(status) if status.isdecimal() and len(status) == 3 else 502
        self._is_stream = self._status == 200 and fields.get("content-type", "").startswith("text/event-stream")
        self._observed: Observed = began(is_stream=self._is_stream) if self._status < 300 else ErrorStatus(self._status)
        """What the engine did so far; of an error, the body is not read yet."""
        self._why = f"the engine answered {self._status}"
        self._tail = Tail()
        self._has_begun = False
        self.is_ended = False
        self.attempt: Attempt | None = exchange.last
        """The running attempt at the pod that gave it; None for a request without keys, or for an unknown pod."""
        if self.attempt is not None and served is not None and served != endpoint_of_pod(self.attempt.pod):
            self._go_elsewhere(self.attempt, served)

    @property
    def has_served(self) -> bool:
        """Whether the engine began to serve the request, as its status says."""
        return self._status < 300 and self._has_begun

    def add(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        if not chunk:
            return
        if not self._has_begun:
            if self._is_stream and (found := observed_event(chunk)) is not None:
                self._observed, self._why = found
            self.began()
            if self.attempt is not None and self.attempt.has_run:
                self._parts.conversations.began(self._exchange, chunk, self.attempt.pod.pod_id)
        self._tail.add(chunk)

    def began(self) -> None:
        """Note that the first byte of the body has come, or the first sign of it that the proxy gives."""
        self._has_begun = True
        attempt, exchange = self.attempt, self._exchange
        if attempt is None or not isinstance(result_of(self._observed, ClientHas.NOTHING), GoesOn):
            return
        now_s = self._clock()
        exchange.began(now_s)
        attempt.answered(GOES_ON)
        self._parts.accounting.began(exchange, attempt, now_s)
        if exchange.inbound is not None and exchange.inbound.prompts == 1:
            exchange.recounted(header_usage(self._fields))
            attempt.first_token(exchange.usage.cached_tokens)

    def ended(self) -> None:
        """Note that the body is whole."""
        if self.is_ended:
            return
        self.is_ended = True
        if not self._has_begun:
            self.began()
        exchange, attempt, tail = self._exchange, self.attempt, self._tail.last_bytes()
        exchange.answered(self._status)
        exchange.counted(self._tail.usage() if self._is_stream else whole_usage(tail))
        if attempt is None or exchange.inbound is None:
            return
        observed = self._observed_at_end(tail)
        if isinstance(observed, ErrorStatus) and observed.is_unknown_path:
            self._parts.candidates.lacks(attempt.pod.pod_id, exchange.inbound)
        attempt.answered(result_of(observed, ClientHas.PART if attempt.has_run else ClientHas.NOTHING))
        self._leave(attempt)  # first, so that the request no longer counts at the pod
        self._parts.accounting.ended_at_proxy(exchange, attempt, self._why)

    def close(self) -> None:
        """Note that nothing more will come."""
        if self.is_ended:
            return
        if self._is_stream and self._has_begun:
            self._exchange.counted(self._tail.usage(is_broken=True))
        if self.attempt is not None:
            self._leave(self.attempt)

    def _observed_at_end(self, tail: bytes) -> Observed:
        """Return what the engine did, now that the body is whole."""
        if self._status >= 300:
            observed = observed_status(self._status, tail, says_when="retry-after" in self._fields)
            cause = _cause_at_proxy(tail) if self._status >= 500 else None
            return observed if cause is None else replace(observed, meaning=cause)
        if not isinstance(self._observed, Began):
            return self._observed
        return GaveUp() if is_aborted(tail) else ended(is_stream=self._is_stream)

    def _leave(self, attempt: Attempt) -> None:
        """End an attempt. If it never ran, its prefix no longer counts as held by its pod, either."""
        if attempt.asked.prompts == 1:
            attempt.lease.computed_tokens = self._exchange.usage.computed_tokens(attempt.pod.tells_cached_tokens)
        attempt.__exit__()
        self._parts.accounting.undo(attempt)

    def _go_elsewhere(self, attempt: Attempt, served: str) -> None:
        """Move the attempt: the proxy could not use the chosen pod, and a fallback gave the answer."""
        parts, exchange, inbound = self._parts, self._exchange, self._exchange.inbound
        assert inbound is not None
        attempt.answered(Retry(Cause.UNABLE, "status"))
        attempt.pod.faults.doubt()
        parts.fleet.look_at(attempt.pod)
        self._leave(attempt)
        self.attempt = None
        pods = parts.fleet.pods(inbound.model)
        others = frozenset(pod.pod_id for pod in pods if endpoint_of_pod(pod) != served)
        try:
            choice = parts.chooser.choose(inbound, others)
        except Unavailable:
            return  # the pod that served takes no more requests, or is not ours
        self.attempt = parts.attempts.begin(exchange, inbound, choice)
        self.attempt.__enter__()


def _cause_at_proxy(body: bytes) -> Cause | None:
    """Return what the body of an error of Envoy's own says."""
    if body.startswith(NOT_REACHED):
        return Cause.UNREACHABLE
    return Cause.UNABLE if body.startswith(OF_THE_PROXY) else None
