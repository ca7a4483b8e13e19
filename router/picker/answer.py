"""What is learnt from an answer that another proxy passes on: which pod gave it, its tokens, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from engine.contract.errors import Unavailable
from router.engines.engine_errors import is_aborted, meaning, meaning_of_body
from router.engines.error_events import engine_error
from router.engines.outcome import Outcome, of_status
from router.engines.usage import Tail, header_usage, whole_usage
from router.forwarding.attempt import Attempt
from router.forwarding.candidates import is_unknown_path
from router.forwarding.exchange import Exchange
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
        self._outcome = of_status(self._status, says_when="retry-after" in fields)
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
            if self._is_stream and (said := engine_error(chunk)) is not None:
                self._outcome = meaning(said.message) or (Outcome.TURNED_AWAY if said.code == 503 else Outcome.BROKEN)
                self._why = said.message
            self.began()
            if self.attempt is not None and self._outcome is Outcome.ANSWERED:
                self._parts.conversations.began(self._exchange, chunk, self.attempt.pod.pod_id)
        self._tail.add(chunk)

    def began(self) -> None:
        """Note that the first byte of the body has come, or the first sign of it that the proxy gives."""
        self._has_begun = True
        attempt, exchange = self.attempt, self._exchange
        if attempt is None or self._outcome is not Outcome.ANSWERED:
            return
        now_s = self._clock()
        exchange.first_byte_s = now_s
        attempt.has_run = True
        attempt.pod.faults.began(now_s)
        if exchange.inbound is not None and exchange.inbound.prompts == 1:
            exchange.usage = header_usage(self._fields)
            attempt.first_token(exchange.usage.cached_tokens)

    def ended(self) -> None:
        """Note that the body is whole."""
        if self.is_ended:
            return
        self.is_ended = True
        if not self._has_begun:
            self.began()
        exchange, attempt, tail = self._exchange, self.attempt, self._tail.last_bytes()
        exchange.status = self._status
        usage = self._tail.usage() if self._is_stream else whole_usage(tail)
        exchange.usage = usage.or_else(exchange.usage)
        if attempt is None or exchange.inbound is None:
            return
        outcome = self._outcome
        if self._status >= 500:
            outcome = _meaning(tail) or outcome
        elif outcome is Outcome.ANSWERED and is_aborted(tail):
            outcome = Outcome.ABORTED
        elif outcome is Outcome.REFUSED and is_unknown_path(self._status, tail):
            self._parts.reach.lacks(attempt.pod.pod_id, exchange.inbound)
        attempt.outcome = outcome
        if outcome is Outcome.ANSWERED:
            self._parts.fleet.served(attempt.pod, sent_s=attempt.sent_s)
        self._leave(attempt)
        if outcome not in (Outcome.ANSWERED, Outcome.REFUSED):  # noted when the request no longer counts at the pod
            exchange.error = self._why
            self._parts.blame.failed_at_proxy(exchange.inbound, attempt, outcome, self._why)

    def close(self) -> None:
        """Note that nothing more will come."""
        if self.is_ended:
            return
        if self._is_stream and self._has_begun:
            self._exchange.usage = self._tail.usage(is_broken=True).or_else(self._exchange.usage)
        if self.attempt is not None:
            self._leave(self.attempt)

    def _leave(self, attempt: Attempt) -> None:
        """End an attempt. If it never ran, its prefix no longer counts as held by its pod, either."""
        inbound = self._exchange.inbound
        assert inbound is not None
        if inbound.prompts == 1:
            attempt.lease.computed_tokens = self._exchange.usage.computed_tokens(attempt.pod.tells_cached_tokens)
        attempt.__exit__()
        if not attempt.has_run:
            attempt.undone(self._parts.chooser.undo(inbound, attempt.choice))

    def _go_elsewhere(self, attempt: Attempt, served: str) -> None:
        """Move the attempt: the proxy could not use the chosen pod, and a fallback gave the answer."""
        parts, exchange, inbound = self._parts, self._exchange, self._exchange.inbound
        assert inbound is not None
        attempt.outcome = Outcome.UNABLE
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


def _meaning(body: bytes) -> Outcome | None:
    """Return what the body of an error means, from known texts of engines and of Envoy."""
    if body.startswith(NOT_REACHED):
        return Outcome.UNREACHABLE
    return Outcome.UNABLE if body.startswith(OF_THE_PROXY) else meaning_of_body(body)
