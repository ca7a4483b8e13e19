"""Traces of requests: begun with the request's headers, told to the sink when the request has ended.

A span is made of a request that is over, all at once. So a request that is not traced costs a random number and a
comparison, and nothing of the SDK is in the way of one that is under way.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multidict import MultiMapping

from engine.contract.otel import w3c
from engine.contract.otel.sampling import Sampling

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]


class Kind(Enum):
    """Which side of a call a span is."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(slots=True)
class Trace:
    """A request's place in its trace."""

    trace_id: int
    span_id: int
    """Of the request's own span here."""
    parent_id: int
    """Of the caller's span; 0: there is none."""
    flags: int
    state: str
    started_ns: int
    """Nanoseconds since 1970."""

    @property
    def is_sampled(self) -> bool:
        """Whether its spans are wanted."""
        return bool(self.flags & w3c.SAMPLED)

    @property
    def trace_id_hex(self) -> str:
        """As logs and other tools show it."""
        return f"{self.trace_id:032x}"

    def child_id(self) -> int:
        """The id of a further span under the request's own. A request that is not sampled has one id for all."""
        return new_span_id() if self.flags & w3c.SAMPLED else self.span_id

    def fields(self, span_id: int) -> bytes:
        """Header fields for whoever is called within that span."""
        return w3c.fields(self.trace_id, span_id, self.flags, self.state)


@dataclass(slots=True)
class Span:
    """A piece of work that is over. Times are nanoseconds since 1970.

    `error`: why it failed, as one of a fixed few words; empty: it did not. It carries nothing that a client wrote but
    the request's id and the name of a model that is served, and no word of an engine.
    """

    name: str
    kind: Kind
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
        """The trace of a request that came with these headers: the caller's, or a new one."""
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
        """Hand over the spans of a request. A sink that fails costs the spans alone; the first time is logged."""
        try:
            for span in spans:
                self._sink(span)
        except Exception:  # the request is answered, whatever is wrong here
            if not self._has_failed:
                self._has_failed = True
                log.exception("a span could not be made; further failures are not logged")


def new_span_id() -> int:
    """64 random bits, which are not all zero."""
    return random.getrandbits(64) or 1
