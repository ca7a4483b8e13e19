"""Log lines on stderr: plain text for the program, one JSON object per request where asked for."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import orjson

from engine.contract.log_lines import Format, configure

REQUESTS = "router.requests"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as its log line has it. Times are milliseconds from the request's arrival."""

    time: str
    """Of its end, in UTC."""
    request_id: str
    trace_id: str | None
    """Of its trace, sampled or not; None where nobody asks for traces."""
    tenant: str
    key_id: str | None
    """The beginning of the SHA-256 of the key that was shown; None where none is asked for."""
    client: str
    """The address that the connection came from: a load balancer's, if one is in front."""
    path: str
    model: str
    policy: str
    pod: str
    status: int
    attempts: int
    breaks: int
    prompt_tokens_estimated: int
    prompt_tokens: int | None
    """As the engine said; likewise the next."""
    completion_tokens: int | None
    cached_tokens_predicted: int
    cached_tokens: int | None
    queue_ms: float
    """Of these, waiting for an engine with room."""
    first_byte_ms: float | None
    total_ms: float
    error: str | None


def configure_logging(level: str, *, requests: bool, log_format: Format = "text") -> None:
    """Program events at `level` and above to stderr; request lines, which are JSON either way, only with `requests`."""
    configure(level, log_format)
    lines = logging.getLogger(REQUESTS)
    lines.propagate = False
    lines.setLevel(logging.INFO if requests else logging.CRITICAL)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    lines.handlers[:] = [handler]


class RequestLog:
    """Writes request records where they are wanted; costs one comparison where not."""

    def __init__(self) -> None:
        self._log = logging.getLogger(REQUESTS)
        self.enabled = self._log.isEnabledFor(logging.INFO)

    def write(self, record: RequestRecord) -> None:
        """One line."""
        if self.enabled:
            self._log.info("%s", orjson.dumps(asdict(record)).decode())
