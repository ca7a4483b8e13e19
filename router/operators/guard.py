"""Refuses requests at the operators' port that web pages of other sites make."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.common.site_guard import why_not
from router.edge.errors import Forbidden
from router.operators.audit import UNRECORDED


def guarded(own: str) -> Middleware:
    """Return the middleware. `own`: the host that the port is bound to. Paths that reveal nothing stay open, since
    Prometheus may know this host by any name."""
    names = {own.lower(), socket.gethostname().lower()}

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in UNRECORDED and (why := why_not(request.method, request.headers, names)) is not None:
            raise Forbidden(why, code="cross_site")
        return await handler(request)

    return check
