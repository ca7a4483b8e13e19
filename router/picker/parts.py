"""The gateway's parts that the picker shares, and the picker's own bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from engine.common.otel.tracer import Tracer
from router.choosing.chooser import Chooser
from router.edge.admission import Admission
from router.edge.client_keys import ClientKeys
from router.edge.errors import Unauthorized
from router.edge.headers import UpstreamHeaders
from router.endpoints.intake import Reading
from router.endpoints.stored_responses import StoredResponses
from router.fleet.fleet import Fleet
from router.forwarding.attempts import Attempts
from router.forwarding.candidates import Candidates
from router.forwarding.conversations import Conversations
from router.forwarding.failure_accounting import FailureAccounting
from router.forwarding.recorder import Recorder
from router.forwarding.waiting import WaitingRoom
from router.kubernetes.inference_objectives import Objectives
from router.reading.client_paths import Found
from router.telemetry.metrics import Metrics
from router.tenants.limiter import Limiter
from router.tenants.tenant import Tenant


class NoPort(Exception):
    """The picker's port is not available; the text says which."""


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """Bounds, times in seconds, and what clients are told and may ask for."""

    max_body_bytes: int
    body_s: float
    """From a request's headers to the end of its body."""
    total_s: float
    """For a request and its answer together."""
    fallbacks: int
    """Further endpoints that the proxy may try."""
    tells_cache: bool = True
    """Whether answers may have the headers about pods and caches."""
    passes_through: bool = False
    """Whether clients may use the paths that only engines know."""
    takes_tests: bool = False
    """Whether the headers of the conformance tests are followed."""
    has_tenants: bool = False
    """Whether tenants' shares and highest priorities override what requests ask for."""


@dataclass(frozen=True, slots=True)
class PickerParts:
    """The gateway's own parts: the picker decides as the gateway does."""

    admission: Admission
    reading: Reading
    candidates: Candidates
    conversations: Conversations
    fleet: Fleet
    room: WaitingRoom
    chooser: Chooser
    attempts: Attempts
    accounting: FailureAccounting
    recorder: Recorder
    limiter: Limiter
    upstream: UpstreamHeaders
    metrics: Metrics
    tracer: Tracer | None
    keys: ClientKeys | None
    """None: everybody who reaches the proxy may ask."""
    on_refusal: Callable[[Unauthorized], None]
    stored: StoredResponses
    own: Callable[[Found, Tenant], web.Response]
    """Returns the gateway's own answer to a path of Kind.OWN. Raises ApiError."""
    limits: PickerLimits
    objectives: Objectives | None = None
    """None: no objectives are followed."""
