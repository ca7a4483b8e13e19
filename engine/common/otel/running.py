"""Sends traces and metrics while a program serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from engine.common.otel.environment import OtelSettings, from_environment
from engine.common.otel.tracer import Tracer

if TYPE_CHECKING:
    from prometheus_client import Metric

    from engine.common.otel.metrics_sdk import MetricExport
    from engine.common.otel.sdk import SpanExport

log = logging.getLogger(__name__)

LAST_S = 3.0
"""Seconds that a stopping program gives to its last spans, and as many to its last metrics. Unsent ones are lost."""
_INSTANCE = str(uuid.uuid4())
"""The instance id of this process if it has no name."""


@contextlib.asynccontextmanager
async def tracing(service: str, *, instance: str = "") -> AsyncIterator[Tracer | None]:
    """Yield a tracer if the environment turns on traces, else None. Raises ConfigError.

    `service`: the program's name, unless the environment gives another. `instance`: distinguishes processes of the same
    name; random if empty. The exit sends the queued spans for at most LAST_S.
    """
    settings = from_environment(os.environ)
    if settings.traces is None:
        yield None
        return
    export = await asyncio.to_thread(_span_export, settings.traces, settings, service, instance)
    try:
        yield Tracer(settings.sampling, export)
    finally:
        if not await finished(export.close, LAST_S):
            log.warning("traces: the collector did not take the last spans within %g s: they are lost", LAST_S)


def _span_export(protocol: str, settings: OtelSettings, service: str, instance: str) -> SpanExport:
    from engine.common.otel.sdk import SpanExport, resource_of

    return SpanExport(protocol, resource_of(settings.service_name or service, instance or _INSTANCE))


@contextlib.asynccontextmanager
async def metrics_sent(
    service: str, collect: Callable[[], Sequence[Metric]], *, instance: str = ""
) -> AsyncIterator[None]:
    """Send the metrics that `collect` returns, every minute or at the environment's interval, and once at the end.

    `collect` is called on the event loop; all else runs in a thread. While a collector hangs, no more is sent.
    `service` and `instance`: see `tracing`. Raises ConfigError.
    """
    settings = from_environment(os.environ)
    if settings.metrics is None:
        yield
        return
    export = await asyncio.to_thread(_metric_export, settings.metrics, settings, service, instance)

    async def send() -> None:
        while True:
            await asyncio.sleep(settings.metrics_every_s)
            families = collect()
            await finished(lambda: export.send(families, time.time_ns()), None)  # noqa: B023 - awaited here

    sending = asyncio.create_task(send(), name="metrics over OTLP")
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        last = collect()
        if not await finished(lambda: _send_last(export, last), LAST_S):
            log.warning("metrics: the collector did not take the last ones within %g s: they are lost", LAST_S)


def _send_last(export: MetricExport, families: Sequence[Metric]) -> None:
    export.send(families, time.time_ns())
    export.close()


def _metric_export(protocol: str, settings: OtelSettings, service: str, instance: str) -> MetricExport:
    from engine.common.otel.metrics_sdk import MetricExport
    from engine.common.otel.sdk import resource_of

    return MetricExport(protocol, resource_of(settings.service_name or service, instance or _INSTANCE))


async def finished(call: Callable[[], object], within_s: float | None) -> bool:
    """Run a blocking `call` in a thread and return whether it ends in time; None: no limit. The thread does not keep
    the process from ending."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        except Exception:
            log.exception("telemetry could not be sent")
        with contextlib.suppress(RuntimeError):  # the loop has closed, so nobody waits
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="telemetry-send", daemon=True).start()
    try:
        async with asyncio.timeout(within_s):
            await done.wait()
    except TimeoutError:
        return False
    return True
