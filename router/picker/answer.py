"""What is learnt from an answer that another proxy passes on: which pod gave it, its tokens, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from engine.contract.errors import Unavailable
from engine.contract.requests import Endpoint
from router.edge.errors import UnsupportedEncoding
from router.edge.inflate import Inflater, NotCompressed, inflater_for
from router.engines.attempt_result import (
    GOES_ON,
    Began,
    Cause,
    ClientHas,
    ErrorStatus,
    Failed,
    Failure,
    GoesOn,
    NoAnswer,
    Observed,
    Retry,
    began,
    ended,
    result_of,
)
from router.engines.stream_events import EventSplitter
from router.engines.stream_reader import StreamFailed, StreamReader
from router.engines.upstream import cannot_inflate, observed_status
from router.engines.usage import TAIL_BYTES, Usage, header_usage, whole_usage
from router.engines.whole_answers import PARSED_BYTES, observed_whole
from router.forwarding.exchange import Attempt, Exchange
from router.picker.destination import endpoint_of_pod
from router.picker.parts import PickerParts

NOT_REACHED = b"upstream connect error or disconnect/reset before headers"
"""Beginning of the body of Envoy's own 503, if a connection failed or broke."""
MAX_EVENT_BYTES = 2**20
"""Longest event of a stream that is read."""
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
        inbound = exchange.inbound
        self._endpoint = "" if inbound is None else str(inbound.endpoint)
        is_stream = self._status == 200 and fields.get("content-type", "").startswith("text/event-stream")
        self._reader = StreamReader(self._endpoint, inbound.answers) if is_stream and inbound is not None else None
        self._inflater: Inflater | None = None
        self._observed: Observed = began(is_stream=is_stream) if self._status < 300 else ErrorStatus(self._status)
        """What the engine did so far; of an error, the body is not read yet."""
        self._why = f"the engine answered {self._status}"
        self._head = self._last = b""
        """The beginning of the body, and the last bytes of one that is no stream."""
        self._splitter = EventSplitter()
        self._has_begun = False
        self.is_ended = False
        self.attempt: Attempt | None = exchange.last
        """The running attempt at the pod that gave it; None for a request without keys, or for an unknown pod."""
        if self.attempt is not None and served is not None and served != endpoint_of_pod(self.attempt.pod):
            self._go_elsewhere(self.attempt, served)
        coding = fields.get("content-encoding")
        try:
            self._inflater = inflater_for(coding)
        except UnsupportedEncoding:
            self._fails(NoAnswer(), cannot_inflate(self._status, coding))

    @property
    def has_served(self) -> bool:
        """Whether the engine began to serve the request, as its status says."""
        return self._status < 300 and self._has_begun

    def add(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        if self._inflater is None:
            self._take(chunk)
            return
        try:
            for piece in self._inflater.inflate(chunk):
                self._take(piece)
        except NotCompressed as damage:
            self._fails(Failed(Failure.DISCONNECT), f"its compressed body is damaged: {damage}")

    def _take(self, chunk: bytes) -> None:
        if not chunk:
            return
        if len(self._head) < PARSED_BYTES:
            self._head += chunk[: PARSED_BYTES + 1 - len(self._head)]
        if self._reader is None:
            self._last = (self._last + chunk)[-TAIL_BYTES:]
            self._begin()
            return
        if events := self._splitter.feed(chunk):
            self._read(self._reader, events)
        elif self._splitter.held_bytes > MAX_EVENT_BYTES:
            self._splitter.take_held()  # nothing in an event of this length is needed

    def _read(self, reader: StreamReader, events: bytes) -> None:
        try:
            reader.read(events)
        except StreamFailed as failed:
            self._fails(failed.observed, failed.message)
        if reader.has_begun:
            self._begin()

    def _begin(self) -> None:
        """Note that the answer has begun, if this is news."""
        if self._has_begun:
            return
        self.began()
        if self.attempt is not None and self.attempt.has_run and self._endpoint == Endpoint.RESPONSES:
            self._parts.conversations.began(self._exchange, self._head, self.attempt.pod.pod_id)

    def _fails(self, observed: Observed, why: str) -> None:
        """Note that the answer is none, or was broken off; the first failure counts."""
        if isinstance(self._observed, Began):
            self._observed, self._why = observed, why

    def began(self) -> None:
        """Note that the answer's first token has come, or the first sign of an answer that the proxy gives."""
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
        if self._reader is not None and self._sees:
            self._read(self._reader, self._splitter.take_held() + b"\n\n")  # the last event may lack its blank line
            if not self._reader.is_over or not self._reader.has_begun:
                self._fails(Failed(Failure.DISCONNECT), "the engine ended its answer too early")
        if not self._has_begun:
            self.began()
        exchange, attempt = self._exchange, self.attempt
        exchange.answered(self._status)
        exchange.counted(self._usage())
        if attempt is None or exchange.inbound is None:
            return
        observed = self._observed_at_end()
        if isinstance(observed, ErrorStatus) and observed.is_unknown_path:
            self._parts.candidates.lacks(attempt.pod, exchange.inbound)
        attempt.answered(result_of(observed, ClientHas.PART if attempt.has_run else ClientHas.NOTHING))
        self._leave(attempt)  # first, so that the request no longer counts at the pod
        self._parts.accounting.ended_at_proxy(exchange, attempt, self._why)

    @property
    def _sees(self) -> bool:
        """Whether the proxy has shown the body."""
        return bool(self._head)

    def _usage(self, *, is_broken: bool = False) -> Usage:
        return whole_usage(self._last) if self._reader is None else self._reader.usage(is_broken=is_broken)

    def close(self) -> None:
        """Note that nothing more will come."""
        if self.is_ended:
            return
        if self._reader is not None and self._has_begun:
            self._exchange.counted(self._usage(is_broken=True))
        if self.attempt is not None:
            self._leave(self.attempt)

    def _observed_at_end(self) -> Observed:
        """Return what the engine did, now that the body is whole."""
        if self._status >= 300:
            body, attempt = self._head[:PARSED_BYTES], self.attempt
            observed = observed_status(
                self._status,
                body,
                says_when="retry-after" in self._fields,
                has_own_key=attempt is not None and self._parts.upstream.has_own_key(attempt.pod),
            )
            cause = _cause_at_proxy(body) if self._status >= 500 else None
            return observed if cause is None else replace(observed, meaning=cause)
        if not isinstance(self._observed, Began):
            return self._observed
        if self._reader is None and self._sees and len(self._head) <= PARSED_BYTES:
            return observed_whole(self._endpoint, self._head)
        return ended(is_stream=self._reader is not None)

    def _leave(self, attempt: Attempt) -> None:
        """End an attempt. If it never ran, its prefix no longer counts as held by its pod, either."""
        if attempt.asked.prompts == 1:
            attempt.tracked.computed_tokens = self._exchange.usage.computed_tokens(attempt.pod.tells_cached_tokens)
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
