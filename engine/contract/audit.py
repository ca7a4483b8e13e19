"""Who did what as an operator: one JSON line on stderr for each action, whatever came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from engine.contract.errors import escaped

AUDIT = "warmroute.audit"
CLIENT_GONE = 499
"""nginx's status for a client that left before its answer."""


@dataclass(slots=True)
class Action:
    """One action, under way."""

    detail: dict[str, Any] = field(default_factory=dict)
    """What is done, or to what."""
    status: int = CLIENT_GONE
    """HTTP status of the answer."""


@contextmanager
def recorded(method: str, path: str, by: str | None) -> Iterator[Action]:
    """Write the line of an action when the block ends. `by`: the address that asked."""
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
    """Audit lines to stderr, whatever the level of the log."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    lines = logging.getLogger(AUDIT)
    lines.propagate = False
    lines.setLevel(logging.INFO)
    lines.handlers[:] = [handler]
