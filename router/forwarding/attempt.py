"""One attempt: a request at one pod, its load there, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.events import Keys
from router.choosing.chooser import Choice
from router.edge.errors import UpstreamError
from router.engines.outcome import Outcome
from router.fleet.faults import Fault
from router.fleet.pod import Lease, Pod
from router.peer_sync.sent_reports import SentReport


@dataclass(slots=True)
class Attempt:
    """One request at one pod; fields are set as the attempt proceeds. Times are seconds of the loop's clock."""

    choice: Choice
    lease: Lease
    sent_s: float
    told: SentReport | None = None
    """Reports the attempt to the other gateways; None if they need no report."""
    session_id: str | None = None
    """Session id in the pod's KV events for the blocks of this request; None: the client's own, if any, is sent."""
    outcome: Outcome | None = None
    """None while the attempt is under way, and if it was cancelled."""
    reason: str = ""
    """Why another pod is tried, as the label in the metrics."""
    error: UpstreamError | None = None
    """The error that the client gets if no other attempt succeeds."""
    fault: Fault | None = None
    """The fault of the pod, kept until it is known whether another pod can answer."""
    has_run: bool = False
    """Whether the pod began the work; if not, this attempt left nothing of the prompt in its cache."""

    span_id: int = 0
    """Id of the attempt's span; 0 without tracing."""
    first_byte_s: float | None = None
    ended_s: float | None = None
    """None while the attempt is under way."""

    is_on_budget: bool = False
    """Whether the retry budget counts the attempt as under way."""

    @property
    def pod(self) -> Pod:
        """The pod that was chosen."""
        return self.choice.pod

    def __enter__(self) -> Attempt:
        """Count the attempt on its pod, here and at the other gateways."""
        self.lease.__enter__()
        if self.told is not None:
            self.told.sent()
        return self

    def __exit__(self, *exc: object) -> None:
        self.lease.__exit__()
        if self.told is not None:
            self.told.ended()

    def first_token(self, cached_tokens: int | None) -> None:
        """Record the answer's first byte. `cached_tokens`: reused prompt tokens; None if the pod does not say."""
        self.lease.first_token(cached_tokens)
        if self.told is not None:
            self.told.began(cached_tokens)

    def undone(self, keys: Keys) -> None:
        """Tell the other gateways that the attempt never ran, so the pod does not hold `keys`."""
        if self.told is not None:
            self.told.undone(keys)

    def failed(self, outcome: Outcome, now_s: float) -> None:
        """Set the outcome of an attempt that sent the client nothing.

        A pod that turns one request away while it answers others is full.
        """
        if outcome is Outcome.TURNED_AWAY and self.pod.faults.is_at_work(now_s):
            outcome = Outcome.FULL
        self.outcome = outcome
