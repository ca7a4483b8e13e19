"""Enough open files for the engine's connections."""

from __future__ import annotations

import logging

from engine.common.descriptors import raise_file_limit

log = logging.getLogger(__name__)
OWN_DESCRIPTORS = 64
"""Open files besides clients' connections: libraries, listening sockets, Redis, tiers."""


def want_descriptors(connections: int) -> None:
    """Raise the limit of open files, and say so if it is too low for this many connections: the system would reset
    those beyond it, without a word in the log."""
    limit = raise_file_limit()
    if limit is not None and limit < connections + OWN_DESCRIPTORS:
        log.warning(
            "at most %d connections can be open at once, fewer than the %d requests of --max-running and "
            "--max-waiting: the system allows %d open files (ulimit -Hn)",
            max(0, limit - OWN_DESCRIPTORS),
            connections,
            limit,
        )
