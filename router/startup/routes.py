"""Assigns handlers to paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from aiohttp import web

from router.edge.body import no_go_ahead
from router.edge.client_keys import tenant_of
from router.edge.connection_limits import leaving_fifo
from router.endpoints.generate import Generate
from router.endpoints.stored_responses import Stored
from router.operators.model_list import ModelList
from router.operators.readiness import Readiness
from router.reading.client_paths import CACHE, LISTED, MODEL, MODELS, Kind
from router.startup.parts import (
    GENERATE,
    LIMITER,
    MODEL_LIST,
    NAMED_CACHES,
    READINESS,
    SETTINGS,
    STORED,
)
from router.stored.named_caches import NamedCaches

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application) -> None:
    """Add every path of --port, as `client_paths.py` lists them. The handlers exist once the application has
    started."""
    by_kind = {kind: _to(GENERATE, Generate.handle) for kind in (Kind.PREFIX, Kind.LOAD, Kind.UPLOAD)}
    by_kind[Kind.STORED] = _to(STORED, Stored.handle)
    for listed in LISTED:
        handler = by_kind.get(listed.kind) or _OWN[listed.method, listed.pattern]
        if listed.method == "GET" and listed.kind is not Kind.STORED:
            app.router.add_get(listed.pattern, handler)  # allows HEAD too
        else:
            app.router.add_route(listed.method, listed.pattern, handler, expect_handler=no_go_ahead)
    if app[SETTINGS].pass_through:  # last, because it takes all other paths
        app.router.add_post("/v1/{path:.+}", _to(GENERATE, Generate.pass_through), expect_handler=no_go_ahead)


def _to(key: web.AppKey[T], method: Callable[[T, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
    """Return a handler that calls `method` of the object at `key`, which exists once the application has started."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await method(request.app[key], request)

    return handle


def _charged(handler: Handler) -> Handler:
    """Return a handler whose requests count in the tenant's limits, though no engine computes anything for them: each
    may cost the gateway as much as a chat."""

    async def handle(request: web.Request) -> web.StreamResponse:
        async with request.app[LIMITER].take(tenant_of(request), on_wait=leaving_fifo(request)) as taking:
            taking.used = 0
            return await handler(request)

    return handle


_OWN: Mapping[tuple[str, str], Handler] = {
    ("POST", "/v1/caches"): _charged(_to(NAMED_CACHES, NamedCaches.create)),
    ("GET", "/v1/caches"): _to(NAMED_CACHES, NamedCaches.list),
    ("GET", CACHE): _to(NAMED_CACHES, NamedCaches.get),
    ("PATCH", CACHE): _charged(_to(NAMED_CACHES, NamedCaches.renew)),
    ("DELETE", CACHE): _to(NAMED_CACHES, NamedCaches.remove),
    ("GET", MODELS): _to(MODEL_LIST, ModelList.models),
    ("GET", MODEL): _to(MODEL_LIST, ModelList.model),
    ("GET", "/health"): _to(READINESS, Readiness.health),
    ("GET", "/ready"): _to(READINESS, Readiness.ready),
}
"""Handlers of the paths that the gateway answers itself, by method and pattern."""
