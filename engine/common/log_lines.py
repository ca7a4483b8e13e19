"""The log of a program on stderr: lines of text for people, or one JSON object per line for log collectors."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal

import orjson

from engine.common.log_writer import STDERR, QueuedHandler

Format = Literal["text", "json"]
MAX_MESSAGE_CHARS = 8192
MAX_TRACEBACK_CHARS = 16_384
"""Characters kept of a traceback's end, which says what went wrong."""


class JsonLines(logging.Formatter):
    """Formats every record as one line: it escapes line ends and bytes that are not text, and cuts long texts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": as_text(record.getMessage(), MAX_MESSAGE_CHARS),
        }
        if record.exc_info:
            line["traceback"] = as_text(
                self.formatException(record.exc_info)[-MAX_TRACEBACK_CHARS:], MAX_TRACEBACK_CHARS
            )
        return orjson.dumps(line).decode()


def configure(level: str, log_format: Format) -> None:
    """Log events at `level` and above to stderr."""
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = QueuedHandler(STDERR, text if log_format == "text" else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def write_bare(name: str, *, is_on: bool) -> None:
    """Write the logger's messages to stderr as they are, whatever the level of the log."""
    lines = logging.getLogger(name)
    lines.propagate = False
    lines.setLevel(logging.INFO if is_on else logging.CRITICAL)
    lines.handlers[:] = [QueuedHandler(STDERR, logging.Formatter("%(message)s"))]


def as_text(text: str, most_chars: int) -> str:
    """Return text that JSON can hold: lone surrogates, such as undecodable bytes of file names, become `?`."""
    return text[:most_chars].encode("utf-8", "replace").decode()


def utc_now() -> str:
    """Return the time in the format of log lines."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
