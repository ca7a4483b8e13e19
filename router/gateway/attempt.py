"""One request at one pod: where it went, how it counts there, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.events import Keys
from router.fleet.faults import Fault
from router.fleet.pod import Lease, Pod
from router.gateway.chooser import Choice
from router.gateway.errors import UpstreamError
from router.gateway.outcome import Outcome
from router.gateway.telling import Told


@dataclass(slots=True)
class Attempt:
    """Filled in as it goes along. Times are seconds of the loop's clock."""

    choice: Choice
    lease: Lease
    sent_s: float
    told: Told | None = None
    """For the other gateways; None where they hear nothing of it."""
    session_id: str | None = None
    """Under which the pod's KV events tell of its blocks; None: the client's own, if any, goes on."""
    outcome: Outcome | None = None
    """None while it is under way, and where it was cancelled."""
    reason: str = ""
    """Of an attempt that another pod is to make good, as metrics have it."""
    error: UpstreamError | None = None
    """For the client, should no other attempt do better."""
    fault: Fault | None = None
    """What counts against the pod, until it is known whether another does better."""
    has_run: bool = False
    """Whether the pod began to do what was asked; else it holds nothing of the prompt for it."""

    span_id: int = 0
    """Of its span; 0 without tracing."""
    first_byte_s: float | None = None
    ended_s: float | None = None
    """None while it is under way."""

    is_on_budget: bool = False
    """Whether it counts as a further attempt under way, which there is a budget for."""

    @property
    def pod(self) -> Pod:
        """Where it went."""
        return self.choice.pod

    def __enter__(self) -> Attempt:
        """From here on it counts on its pod, here and for the other gateways."""
        self.lease.__enter__()
        if self.told is not None:
            self.told.sent()
        return self

    def __exit__(self, *exc: object) -> None:
        self.lease.__exit__()
        if self.told is not None:
            self.told.ended()

    def first_token(self, cached_tokens: int | None) -> None:
        """The answer's first byte came. `cached_tokens`: reused prompt tokens, None where the pod does not say."""
        self.lease.first_token(cached_tokens)
        if self.told is not None:
            self.told.began(cached_tokens)

    def undone(self, keys: Keys) -> None:
        """It never ran, so that the pod holds these no more."""
        if self.told is not None:
            self.told.undone(keys)

    def failed(self, outcome: Outcome, now_s: float) -> None:
        """Without a first byte for the client. A pod that turns one request away while it answers others is full."""
        if outcome is Outcome.TURNED_AWAY and self.pod.faults.is_at_work(now_s):
            outcome = Outcome.FULL
        self.outcome = outcome
