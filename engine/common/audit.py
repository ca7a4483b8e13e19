"""The audit log of operators' actions: one JSON line on stderr for each action, failed ones included."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from engine.common.log_lines import write_bare
from engine.contract.errors import escaped

AUDIT = "warmroute.audit"
CLIENT_GONE = 499
"""nginx's status for a client that left before its answer."""


@dataclass(slots=True)
class Action:
    """One action in progress."""

    detail: dict[str, Any] = field(default_factory=dict)
    """Details of the action, such as its object."""
    status: int = CLIENT_GONE
    """HTTP status of the answer."""


@contextmanager
def recorded(method: str, path: str, by: str | None) -> Iterator[Action]:
    """Write the line of an action when the block ends. `by`: the caller's address."""
    action = Action()
    try:
        yield action
    finally:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "action": f"{escaped(method)} {escaped(path)}",
            "by": by or "",
            **asdict(action),
        }
        logging.getLogger(AUDIT).info("%s", orjson.dumps({"audit": line}).decode())


def configure_audit() -> None:
    """Send audit lines to stderr at every log level."""
    write_bare(AUDIT, is_on=True)
