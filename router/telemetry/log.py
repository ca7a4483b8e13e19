"""Log lines on stderr: plain text for the program, and on demand one JSON object per request."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import orjson

from engine.common.log_lines import Format, configure, write_bare

REQUESTS = "router.requests"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as in its log line. Times are milliseconds from the request's arrival."""

    time: str
    """When it ended, in UTC."""
    request_id: str
    trace_id: str | None
    """Id of its trace, sampled or not; None if traces are off."""
    tenant: str
    key_id: str | None
    """The beginning of the SHA-256 of the client's key; None if no key is needed."""
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
    """As the engine reported; the same holds for the next field."""
    completion_tokens: int | None
    cached_tokens_predicted: int
    cached_tokens: int | None
    queue_ms: float
    """The part of `total_ms` that the request waited for an engine with room."""
    first_byte_ms: float | None
    total_ms: float
    error: str | None


def configure_logging(level: str, *, requests: bool, log_format: Format = "text") -> None:
    """Write program events at `level` and above to stderr; with `requests` also request lines, always as JSON."""
    configure(level, log_format)
    write_bare(REQUESTS, is_on=requests)


class RequestLog:
    """Writes request records if they are wanted; otherwise a call costs one comparison."""

    def __init__(self) -> None:
        self._log = logging.getLogger(REQUESTS)
        self.enabled = self._log.isEnabledFor(logging.INFO)

    def write(self, record: RequestRecord) -> None:
        """Write one line."""
        if self.enabled:
            self._log.info("%s", orjson.dumps(asdict(record)).decode())
