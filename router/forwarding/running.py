"""A request while the gateway handles it: what it is, what became of it so far, and how it goes on.

UNANSWERED -- a pod begins to answer --> Streaming --> Over
Streaming -- its pod breaks it --> Interrupted -- another pod gives the rest --> Streaming
UNANSWERED -- a whole answer --> Over        Interrupted -- nobody gives the rest --> Over
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from aiohttp import web

from router.edge.admission import Admitted
from router.edge.connection_limits import leaving_fifo
from router.forwarding.exchange import Exchange
from router.forwarding.partial_stream import Interrupted, PartialStream
from router.reading.inbound import Inbound


class Unanswered(Enum):
    """The client has nothing of an answer, and pods are asked."""

    UNANSWERED = auto()


UNANSWERED = Unanswered.UNANSWERED


@dataclass(slots=True)
class Streaming:
    """The client has the head of an answer, and a pod gives the body."""

    stream: PartialStream


@dataclass(slots=True)
class Over:
    """The client has all that it will get."""

    response: web.StreamResponse


State = Unanswered | Streaming | Interrupted | Over


class Running:
    """One request."""

    __slots__ = ("admitted", "exchange", "inbound", "request", "state")

    def __init__(self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted) -> None:
        self.request = request
        self.exchange = exchange
        self.inbound = inbound
        self.admitted = admitted
        self.state: State = UNANSWERED

    def leaving_fifo(self) -> Callable[[], None]:
        """Return a function that gives back the connection's place among the requests that are read."""
        return leaving_fifo(self.request)

    def client_left(self, error: Exception, response: web.StreamResponse) -> None:
        """End the request, because the client takes no more of `response`."""
        self.exchange.client_left(error)
        self.cut()
        self.state = Over(response)

    def cut(self) -> None:
        """Cut the client's connection, so that nothing can end the answer as if it were complete."""
        if self.request.transport is not None:
            self.request.transport.abort()
