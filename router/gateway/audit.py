"""The audit of the administration's port: a line for each request there, whatever came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from engine.contract.audit import Action, recorded

UNRECORDED = frozenset(("/health", "/ready", "/metrics"))
"""What kubelets and Prometheus ask every few seconds. It tells of no request and changes nothing."""
_ACTION = web.RequestKey("audit_action", Action)


def note(request: web.Request, **detail: Any) -> None:
    """Have the audit line of `request`, if there is to be one, say `detail`: what was done, or to what."""
    if _ACTION in request:
        request[_ACTION].detail |= detail


@web.middleware
async def audited(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The outermost: it sees the answer that every error has become."""
    if request.path in UNRECORDED:
        return await handler(request)
    with recorded(request.method, request.path, request.remote) as action:
        request[_ACTION] = action
        response = await handler(request)
        action.status = response.status
        return response
