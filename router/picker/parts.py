"""What the picker shares with the gateway it is part of, and its own bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.otel.tracer import Tracer
from router.fleet.fleet import Fleet
from router.gateway.admission import Admission
from router.gateway.attempts import Attempts
from router.gateway.blame import Blame
from router.gateway.chooser import Chooser
from router.gateway.conversations import Conversations
from router.gateway.errors import Unauthorized
from router.gateway.headers import UpstreamHeaders
from router.gateway.keys import ClientKeys
from router.gateway.reach import Reach
from router.gateway.reading import Reading
from router.gateway.recorder import Recorder
from router.gateway.waiting import WaitingRoom
from router.telemetry.metrics import Metrics
from router.tenants.limiter import Limiter


class NoPort(Exception):
    """The picker's port cannot be had; the text says which."""


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """Bounds, times in seconds, and what clients are told and may ask for."""

    max_body_bytes: int
    body_s: float
    """From a request's headers to the end of its body."""
    total_s: float
    """For the whole of a request and its answer."""
    fallbacks: int
    """Further endpoints that the proxy is told to try."""
    tells_cache: bool = True
    """Whether answers may have the headers that tell of pods and caches."""
    takes_tests: bool = False
    """Whether the headers of the conformance tests are followed."""


@dataclass(frozen=True, slots=True)
class PickerParts:
    """The gateway's own parts: the decisions of the picker are the gateway's."""

    admission: Admission
    reading: Reading
    reach: Reach
    conversations: Conversations
    fleet: Fleet
    room: WaitingRoom
    chooser: Chooser
    attempts: Attempts
    blame: Blame
    recorder: Recorder
    limiter: Limiter
    upstream: UpstreamHeaders
    metrics: Metrics
    tracer: Tracer | None
    keys: ClientKeys | None
    """None: whoever reaches the proxy may ask."""
    on_refusal: Callable[[Unauthorized], None]
    limits: PickerLimits
