"""Keeps the OpenTelemetry SDK out of a program that sends no telemetry."""

from __future__ import annotations

import sys
from typing import Any

_METRICS = "opentelemetry.sdk.metrics"


def import_redis() -> None:
    """Import redis-py without the SDK.

    If the SDK is installed, redis-py imports it for its own metrics, which are not used here. That takes a twentieth of
    a program's start-up time. If the import fails, redis-py works without it.
    """
    if "redis" in sys.modules or _METRICS in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules[_METRICS] = None  # the documented way to make an import fail
    try:
        import redis.asyncio  # noqa: F401
    finally:
        del modules[_METRICS]
