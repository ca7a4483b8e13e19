"""Traces as long as a program serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from engine.contract.otel.environment import OtelSettings, from_environment
from engine.contract.otel.tracer import Tracer

if TYPE_CHECKING:
    from engine.contract.otel.sdk import SpanExport

log = logging.getLogger(__name__)

LAST_S = 3.0
"""Seconds that a stopping program gives its last spans to be sent; what is not sent by then is lost."""


@contextlib.asynccontextmanager
async def tracing(service: str, *, instance: str = "") -> AsyncIterator[Tracer | None]:
    """What begins traces, as the environment asks for; None where it does not. Raises ConfigError.

    `service`: the program's name, unless the environment gives another. `instance`: tells it from others of the name;
    a random one if empty. On the way out what is queued is sent, for at most LAST_S.
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
    from engine.contract.otel.sdk import SpanExport, resource_of

    return SpanExport(protocol, resource_of(settings.service_name or service, instance or str(uuid.uuid4())))


async def finished(call: Callable[[], object], within_s: float) -> bool:
    """Whether `call`, which blocks, ends in time. It runs in a thread that keeps no process from ending."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        except Exception:
            log.exception("telemetry: the end failed")
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="telemetry-end", daemon=True).start()
    try:
        async with asyncio.timeout(within_s):
            await done.wait()
    except TimeoutError:
        return False
    return True
