"""Log lines on stderr: plain text for the program, one JSON object per request where asked for."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import orjson

REQUESTS = "router.requests"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as its log line has it. Times are milliseconds from the request's arrival."""

    request_id: str
    tenant: str
    path: str
    model: str
    policy: str
    pod: str
    status: int
    attempts: int
    breaks: int
    prompt_tokens_estimated: int
    cached_tokens_predicted: int
    cached_tokens: int | None
    first_byte_ms: float | None
    total_ms: float
    error: str | None


def configure_logging(level: str, *, requests: bool) -> None:
    """Program events at `level` and above to stderr; request lines only with `requests`."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
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
