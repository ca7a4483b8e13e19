"""A request and what became of it: the record that retries, hedges, the picker, metrics, traces and the log read.

`Arrival` and `Inbound` say what the request is, and are never changed. `Exchange` is the record of what became of it.
Only its methods change it, and those of `Attempt`, of which it has one for each pod that was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from aiohttp import web

from engine.common.otel.tracer import Trace
from engine.contract.errors import ApiError
from engine.contract.events import Keys
from router.choosing.chooser import Choice
from router.edge.errors import UpstreamError
from router.engines.attempt_result import Broken, Cause, Done, GoesOn, Result, Retry
from router.engines.usage import Usage
from router.fleet.faults import Fault
from router.fleet.pod import Pod, TrackedRequest
from router.peer_sync.sent_reports import SentReport
from router.reading.inbound import Inbound
from router.tenants.marks import marked
from router.tenants.tenant import DEFAULT, Tenant

CLIENT_GONE = 499
"""Status in metrics and logs of a request whose client left; it is never sent."""


DIGEST_BYTES = 4096
"""Bytes at the end of a body that tell requests apart."""
_HAS_RUN = (GoesOn, Done, Broken)
_FAILED = (Retry, Broken)


class Urgency(NamedTuple):
    """How soon a request is served, for requests that name an InferenceObjective or a fairness id."""

    priority: int | None = None
    """Priority of the InferenceObjective that the request names; None: the header decides."""
    is_sheddable: bool = False
    """Whether the request is refused if it would have to wait for an engine with room."""
    fairness_id: str = ""
    """Name of a separate queue for some of the tenant's requests; empty: the tenant's queue."""


ORDINARY = Urgency()


class Arrival(NamedTuple):
    """What is known of a request once its head has come. Times are seconds of the loop's clock."""

    request_id: str
    arrived_s: float
    deadline_s: float
    tenant: Tenant = DEFAULT
    client_session: str | None = None
    """The client's name for its session, if it gives one."""
    trace: Trace | None = None
    """None if traces are off."""
    urgency: Urgency = ORDINARY

    @property
    def engine_request_id(self) -> str:
        """The request's id for engines, which tell requests apart by it. Clients choose ids, so it is the tenant's."""
        return marked(self.tenant.name, self.request_id)

    @property
    def engine_session(self) -> str | None:
        """The client's session for engines; None: what the client sent."""
        name = self.client_session
        if name is None or (own := marked(self.tenant.name, name)) == name:
            return None
        return own if name.isascii() and name.isprintable() else own.rpartition(".")[2]

    @property
    def flow(self) -> str:
        """The flow whose share of the queue the request uses. A tenant's name has no slash."""
        return f"{self.tenant.name}/{self.urgency.fairness_id}" if self.urgency.fairness_id else self.tenant.name


@dataclass(slots=True)
class Attempt:
    """One request at one pod: its load there, and its result. Times are seconds of the loop's clock."""

    asked: Inbound
    """What the pod is asked for: the request, or its rest if an earlier pod broke its stream."""
    choice: Choice
    tracked: TrackedRequest
    sent_s: float
    report: SentReport | None = None
    """Reports the attempt to the other gateways; None if they need no report."""
    session_id: str | None = None
    """Session id in the pod's KV events for the blocks of this request; None: the client's own, if any, is sent."""
    span_id: int = 0
    """Id of the attempt's span; 0 without tracing."""
    is_on_budget: bool = False
    """Whether the retry budget counts the attempt as under way."""
    result: Result | None = None
    """None until the pod has answered, and if the attempt was cancelled before."""
    reply: web.Response | UpstreamError | None = None
    """What the client gets if it has nothing of another attempt: the pod's whole answer, or an error. None while the
    attempt is under way, and if the answer is passed on as it comes."""
    fault: Fault | None = None
    """The fault of the pod, kept until it is known whether another pod can answer."""
    first_byte_s: float | None = None
    ended_s: float | None = None
    """None while the attempt is under way."""

    @property
    def pod(self) -> Pod:
        """The pod that was chosen."""
        return self.choice.pod

    @property
    def has_run(self) -> bool:
        """Whether the pod began the work; if not, this attempt left nothing of the prompt in its cache."""
        return isinstance(self.result, _HAS_RUN)

    @property
    def cause(self) -> Cause | None:
        """Why the attempt failed; None if it did not."""
        return self.result.cause if isinstance(self.result, _FAILED) else None

    def __enter__(self) -> Attempt:
        """Count the attempt on its pod, here and at the other gateways."""
        self.tracked.__enter__()
        if self.report is not None:
            self.report.sent()
        return self

    def __exit__(self, *exc: object) -> None:
        self.tracked.__exit__()
        if self.report is not None:
            self.report.ended()

    def first_token(self, cached_tokens: int | None) -> None:
        """Report the answer's first byte. `cached_tokens`: reused prompt tokens; None if the pod does not say."""
        self.tracked.first_token(cached_tokens)
        if self.report is not None:
            self.report.began(cached_tokens)

    def undone(self, keys: Keys) -> None:
        """Tell the other gateways that the attempt never ran, so the pod does not hold `keys`."""
        if self.report is not None:
            self.report.undone(keys)

    def answered(self, result: Result, reply: web.Response | UpstreamError | None = None) -> None:
        """Record the result so far, and what the client would get."""
        self.result, self.reply = result, reply

    def takes_fault(self, fault: Fault | None) -> None:
        """Keep the pod's fault, or forget it: it has been counted, or was not the pod's."""
        self.fault = fault

    def ended(self, now_s: float) -> None:
        """Record that nothing more comes."""
        self.ended_s = now_s


@dataclass(slots=True)
class Exchange:
    """One request and what became of it. Times are seconds of the loop's clock."""

    arrival: Arrival
    inbound: Inbound | None = None
    """What the request asks for; None until its body is read."""
    attempts: list[Attempt] = field(default_factory=list)
    """The last one gave the answer if there is one."""
    status: int = 0
    error: str | None = None
    """Why the client did not get a whole answer, for the log. None if it got one, whichever pods failed before."""
    first_byte_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    queued_s: float = 0.0
    """Seconds that the request waited for an engine with room, in vain or not."""
    breaks: int = 0
    """Number of times that the stream broke and another pod was to give the rest."""
    keeps: list[str] = field(default_factory=list)
    """Names under which the gateway records which pod keeps this request's response and conversation."""
    rate_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that tell what the tenant has left of its limits."""

    @property
    def last(self) -> Attempt | None:
        """The last attempt, which gave the answer if there is one."""
        return self.attempts[-1] if self.attempts else None

    @property
    def spent(self) -> int:
        """Attempts so far, except at pods that only said that they are leaving: several in a row may do so."""
        return sum([attempt.cause is not Cause.LEAVING for attempt in self.attempts]) if self.attempts else 0

    @property
    def has_run(self) -> bool:
        """Whether a pod began the work."""
        return any(attempt.has_run for attempt in self.attempts)

    @property
    def whole_answer(self) -> web.Response | None:
        """The last complete answer of a pod. If it is an error, it is passed on when no other pod succeeds."""
        return next(
            (attempt.reply for attempt in reversed(self.attempts) if isinstance(attempt.reply, web.Response)), None
        )

    @property
    def tokens_used(self) -> int | None:
        """Tokens that the request took, as far as known; None: use the estimate."""
        if not self.has_run:
            return 0
        if self.inbound is None or self.usage.prompt_tokens is None:
            return None
        output = self.usage.completion_tokens
        return self.usage.prompt_tokens + (self.inbound.answer_tokens if output is None else output)

    def asks(self, inbound: Inbound) -> Inbound:
        """Record what the request asks for."""
        self.inbound = inbound
        return inbound

    def forget_body(self) -> None:
        """Keep only the end of the body, which tells requests apart: it is sent, and not needed again."""
        if self.inbound is not None:
            self.inbound = replace(self.inbound, body=self.inbound.body[-DIGEST_BYTES:])
            for attempt in self.attempts:
                attempt.asked = self.inbound

    def waited(self, seconds: float) -> None:
        """Record a wait for an engine with room."""
        self.queued_s += seconds

    def limited(self, rate_headers: Mapping[str, str]) -> None:
        """Record what the tenant has left of its limits."""
        self.rate_headers = rate_headers

    def began(self, now_s: float) -> None:
        """Record that the answer's first byte has come."""
        self.first_byte_s, self.error = now_s, None

    def counted(self, usage: Usage) -> None:
        """Record token counts. Those that `usage` lacks stay."""
        self.usage = usage.or_else(self.usage)

    def recounted(self, usage: Usage) -> None:
        """Record the token counts at the beginning of an attempt's answer, in place of all earlier ones."""
        self.usage = usage

    def failed(self, why: str | None) -> None:
        """Record why the client has no whole answer so far; None: it has one after all."""
        self.error = why

    def broke(self) -> None:
        """Record that the stream broke, and another pod is asked for the rest."""
        self.breaks += 1

    def kept(self, names: list[str]) -> None:
        """Record under which names the pod's response and conversation are found again."""
        self.keeps = names

    def answered(self, status: int) -> None:
        """Record the status that the client got."""
        self.status = status

    def refused(self, error: ApiError) -> None:
        """Record that the client gets `error` instead of an answer."""
        self.status = error.status
        self.error = error.detail if isinstance(error, UpstreamError) else error.message

    def client_left(self, error: Exception | None = None) -> None:
        """Record that the client has left; `error` says how, if given."""
        self.error = f"client gone: {type(error).__name__}" if error else "client gone"
        self.status = CLIENT_GONE
