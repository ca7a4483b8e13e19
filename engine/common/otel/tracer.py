"""Traces of requests: begun with the request's headers, and given to the sink when the request has ended.

A request's spans are all made after its end. So a request that is not traced costs a random number and a comparison,
and the SDK does not slow down a request in progress.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multidict import MultiMapping

from engine.common.otel import w3c
from engine.common.otel.sampling import Sampling

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]


class SpanKind(Enum):
    """The side of a call that a span describes."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(slots=True)
class Trace:
    """A request's place in its trace."""

    trace_id: int
    span_id: int
    """Id of the request's own span in this program."""
    parent_id: int
    """Id of the caller's span; 0: there is none."""
    flags: int
    state: str
    started_ns: int
    """Nanoseconds since 1970."""

    @property
    def is_sampled(self) -> bool:
        """Whether the request's spans are sent."""
        return bool(self.flags & w3c.SAMPLED)

    @property
    def trace_id_hex(self) -> str:
        """The trace id in the form that logs and other tools show."""
        return f"{self.trace_id:032x}"

    def child_id(self) -> int:
        """Return the id of a new span below the request's own span. Without sampling all spans share one id."""
        return new_span_id() if self.flags & w3c.SAMPLED else self.span_id

    def fields(self, span_id: int) -> bytes:
        """Return the header fields for a call to a server within that span."""
        return w3c.fields(self.trace_id, span_id, self.flags, self.state)


@dataclass(slots=True)
class Span:
    """A finished piece of work. Times are nanoseconds since 1970.

    `error`: why it failed, as one of a few fixed names; empty if it did not. The only text of a client in a span is
    the request's id and the name of a served model. A span contains no text of an engine.
    """

    name: str
    kind: SpanKind
    trace: Trace
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""


class Tracer:
    """Begins traces, and hands finished spans to `sink`, which must not wait."""

    def __init__(self, sampling: Sampling, sink: Callable[[Span], None]) -> None:
        self._sampling = sampling
        self._sink = sink
        self._has_failed = False

    def begin(self, incoming: MultiMapping[str]) -> Trace:
        """Return the trace of a request with these headers: the caller's trace, or a new one."""
        parent = w3c.read(incoming)
        if parent is None:
            trace_id = random.getrandbits(128) or 1
            flags = w3c.RANDOM | w3c.SAMPLED if self._sampling.takes(trace_id, None) else w3c.RANDOM
            return Trace(trace_id, new_span_id(), 0, flags, "", time.time_ns())
        flags = parent.flags & w3c.RANDOM
        if self._sampling.takes(parent.trace_id, parent):
            flags |= w3c.SAMPLED
        return Trace(parent.trace_id, new_span_id(), parent.span_id, flags, parent.state, time.time_ns())

    def end(self, spans: Sequence[Span]) -> None:
        """Hand over the spans of a request. If the sink fails, only the spans are lost; the first failure is logged."""
        try:
            for span in spans:
                self._sink(span)
        except Exception:  # no failure here may affect the request
            if not self._has_failed:
                self._has_failed = True
                log.exception("a span could not be made; further failures are not logged")


def new_span_id() -> int:
    """Return 64 random bits that are not all zero."""
    return random.getrandbits(64) or 1
