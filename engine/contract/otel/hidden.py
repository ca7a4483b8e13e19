"""Keeps the SDK out of a program that sends nothing."""

from __future__ import annotations

import sys
from typing import Any

_METRICS = "opentelemetry.sdk.metrics"


def import_redis() -> None:
    """Import redis-py without the SDK.

    For metrics of its own, which nobody asks for here, redis-py imports the SDK wherever that is installed: a twentieth
    of a program's start. It does without where the import fails.
    """
    if "redis" in sys.modules or _METRICS in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules[_METRICS] = None  # the documented way to have an import fail
    try:
        import redis.asyncio  # noqa: F401
    finally:
        del modules[_METRICS]
