"""A request and what became of it, for headers, metrics and the log line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from engine.contract.otel.tracer import Trace
from router.gateway.attempt import Attempt
from router.gateway.begun import Begun
from router.gateway.inbound import Inbound
from router.gateway.outcome import Outcome
from router.gateway.usage import Usage
from router.tenants.tenant import DEFAULT, Tenant

CLIENT_GONE = 499
"""Status in metrics and logs of a request whose client left; nobody gets it."""


@dataclass(slots=True)
class Exchange:
    """Filled in as the request goes along. Times are seconds of the loop's clock."""

    request_id: str
    arrived_s: float
    deadline_s: float
    tenant: Tenant = DEFAULT
    client_session: str | None = None
    """What the client calls its session, if it does."""
    inbound: Inbound | None = None
    attempts: list[Attempt] = field(default_factory=list)
    answer: web.Response | None = None
    """The last one that a pod gave to its end: an error is passed on where no other pod does better."""
    status: int = 0
    first_byte_s: float | None = None
    queued_s: float = 0.0
    """Seconds that it waited for an engine with room, in vain or not."""
    trace: Trace | None = None
    """None where nobody asks for traces."""
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    rate_headers: Mapping[str, str] = field(default_factory=dict)
    """What the tenant has left of its limits, for the answer."""
    begun: Begun | None = None
    """The answer that is passed on as it comes, once the client has its head."""
    keeps: list[str] = field(default_factory=list)
    """Names of what its engine keeps of it: the response's, the conversation's."""
    breaks: int = 0
    """Times that its stream broke, and another pod was to give the rest."""

    @property
    def spent(self) -> int:
        """Attempts so far, but for those at pods that only said that they leave: several may, one after the other."""
        attempts = self.attempts
        return sum([attempt.outcome is not Outcome.LEAVING for attempt in attempts]) if attempts else 0

    @property
    def has_run(self) -> bool:
        """Whether a pod began to do what was asked."""
        return any(attempt.has_run for attempt in self.attempts)

    @property
    def tokens_used(self) -> int | None:
        """Tokens that the request took, as far as that is known; None: as estimated."""
        if not self.has_run:
            return 0
        if self.inbound is None or self.usage.prompt_tokens is None:
            return None
        output = self.usage.completion_tokens
        return self.usage.prompt_tokens + (self.inbound.output_tokens if output is None else output)

    @property
    def last(self) -> Attempt | None:
        """The attempt that gave the answer, or might have."""
        return self.attempts[-1] if self.attempts else None

    def forget_faults(self) -> None:
        """Those that the pods committed with this request are counted, or are none."""
        for attempt in self.attempts:
            attempt.fault = None

    def client_left(self, error: Exception | None = None) -> None:
        """Nobody takes the answer any more, as `error` says where there is one."""
        self.error = f"client gone: {type(error).__name__}" if error else "client gone"
        self.status = CLIENT_GONE
        if self.attempts:
            self.attempts[-1].outcome = Outcome.CLIENT_GONE
