"""The audit log of the admin port: one line for each request, whatever its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from engine.common.audit import Action, recorded

UNRECORDED = frozenset(("/health", "/ready", "/metrics"))
"""Paths that kubelets and Prometheus ask for every few seconds. They reveal no request and change nothing."""
_ACTION = web.RequestKey("audit_action", Action)


def note(request: web.Request, **detail: Any) -> None:
    """Add `detail` (what was done, or to what) to the audit line of `request`, if it gets one."""
    if _ACTION in request:
        request[_ACTION].detail |= detail


@web.middleware
async def audited(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Record the request. This middleware is the outermost, so it sees errors as the answers that they became."""
    if request.path in UNRECORDED:
        return await handler(request)
    with recorded(request.method, request.path, request.remote) as action:
        request[_ACTION] = action
        response = await handler(request)
        action.status = response.status
        return response
