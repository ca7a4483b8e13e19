"""A request and what became of it, for headers, metrics and the log line."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fleet.faults import Fault
from router.fleet.pod import Pod
from router.gateway.chooser import Choice
from router.gateway.inbound import Inbound
from router.gateway.usage import Usage

CLIENT_GONE = 499
"""Status in metrics and logs of a request whose client left; nobody gets it."""


@dataclass(slots=True)
class Exchange:
    """Filled in as the request goes along. Times are seconds of the loop's clock."""

    request_id: str
    arrived_s: float
    deadline_s: float
    inbound: Inbound | None = None
    choice: Choice | None = None
    attempts: int = 0
    sent_s: float = 0.0
    """When the last attempt began."""
    status: int = 0
    first_byte_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    faults: list[tuple[Pod, Fault]] = field(default_factory=list)
    """Pods that failed the request, until it is known whether another does better."""
