"""A request and its outcome, for headers, metrics and the log line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from engine.common.otel.tracer import Trace
from router.engines.outcome import Outcome
from router.engines.usage import Usage
from router.forwarding.attempt import Attempt
from router.forwarding.partial_stream import Begun
from router.reading.inbound import Inbound
from router.reading.upload import Upload
from router.tenants.tenant import DEFAULT, Tenant

CLIENT_GONE = 499
"""Status in metrics and logs of a request whose client left; it is never sent."""


@dataclass(slots=True)
class Exchange:
    """One request; fields are set as it proceeds. Times are seconds of the loop's clock."""

    request_id: str
    arrived_s: float
    deadline_s: float
    tenant: Tenant = DEFAULT
    priority: int | None = None
    """Priority of the InferenceObjective that the request names; None: the header decides."""
    is_sheddable: bool = False
    """Whether the request is refused if it would have to wait for an engine with room."""
    fairness_id: str = ""
    """Name of a separate queue for some of the tenant's requests; empty: the tenant's queue."""
    client_session: str | None = None
    """The client's name for its session, if it gives one."""
    inbound: Inbound | None = None
    upload: Upload | None = None
    """The body, if it is sent to the engine as it comes."""
    attempts: list[Attempt] = field(default_factory=list)
    answer: web.Response | None = None
    """The last complete answer of a pod. If it is an error, it is passed on when no other pod succeeds."""
    status: int = 0
    first_byte_s: float | None = None
    queued_s: float = 0.0
    """Seconds that the request waited for an engine with room, in vain or not."""
    trace: Trace | None = None
    """None if traces are off."""
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    """Why the client did not get a whole answer, for the log. None if it got one, whichever pods failed before."""
    rate_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that tell what the tenant has left of its limits."""
    begun: Begun | None = None
    """The answer that is passed on as it comes, once the client has the head."""
    keeps: list[str] = field(default_factory=list)
    """Names under which the gateway records which pod keeps this request's response and conversation."""
    breaks: int = 0
    """Number of times that the stream broke and another pod was to give the rest."""

    @property
    def flow(self) -> str:
        """The flow whose share of the queue the request uses. A tenant's name has no slash."""
        return f"{self.tenant.name}/{self.fairness_id}" if self.fairness_id else self.tenant.name

    @property
    def spent(self) -> int:
        """Attempts so far, except at pods that only said that they are leaving: several in a row may do so."""
        attempts = self.attempts
        return sum([attempt.outcome is not Outcome.LEAVING for attempt in attempts]) if attempts else 0

    @property
    def has_run(self) -> bool:
        """Whether a pod began the work."""
        return any(attempt.has_run for attempt in self.attempts)

    @property
    def tokens_used(self) -> int | None:
        """Tokens that the request took, as far as known; None: use the estimate."""
        if not self.has_run:
            return 0
        if self.inbound is None or self.usage.prompt_tokens is None:
            return None
        output = self.usage.completion_tokens
        return self.usage.prompt_tokens + (self.inbound.answer_tokens if output is None else output)

    @property
    def last(self) -> Attempt | None:
        """The last attempt, which gave the answer if there is one."""
        return self.attempts[-1] if self.attempts else None

    def forget_faults(self) -> None:
        """Drop the faults of pods on this request: they have been counted, or were not the pods' faults."""
        for attempt in self.attempts:
            attempt.fault = None

    def client_left(self, error: Exception | None = None) -> None:
        """Record that the client has left; `error` says how, if given."""
        self.error = f"client gone: {type(error).__name__}" if error else "client gone"
        self.status = CLIENT_GONE
        if self.attempts:
            self.attempts[-1].outcome = Outcome.CLIENT_GONE
