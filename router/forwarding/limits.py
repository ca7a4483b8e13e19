"""The bounds of a request on its way through the fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, the number of further pods to try, and what answers may tell clients."""

    first_byte_s: float
    idle_s: float
    retries: int
    tells_cache: bool = True
    """Whether answers may have the headers about pods and caches."""
    resumes: bool = True
    """Whether another pod is asked for the rest of a stream that breaks."""
    hedge_after_s: float = 0.0
    """Seconds without a first byte until a second pod is asked too; 0: never."""
