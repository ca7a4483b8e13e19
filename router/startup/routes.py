"""Assigns handlers to paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from engine.contract.requests import Endpoint
from router.edge.body import no_go_ahead
from router.endpoints.generate import Generate
from router.endpoints.stored_responses import STORED as KEPT
from router.endpoints.stored_responses import Stored
from router.operators.model_list import ModelList
from router.operators.readiness import Readiness
from router.reading.by_load import BY_LOAD, UPLOADS
from router.startup.parts import (
    GENERATE,
    MODEL_LIST,
    NAMED_CACHES,
    READINESS,
    SETTINGS,
    STORED,
)
from router.stored.named_caches import NamedCaches

T = TypeVar("T")


def add_routes(app: web.Application) -> None:
    """Add every path of --port. The handlers exist once the application has started."""
    for endpoint in (*Endpoint, *BY_LOAD, *UPLOADS):
        app.router.add_post(endpoint, _to(GENERATE, Generate.handle), expect_handler=no_go_ahead)
    for method, path in KEPT:
        app.router.add_route(method, path, _to(STORED, Stored.handle), expect_handler=no_go_ahead)
    app.router.add_post("/v1/caches", _to(NAMED_CACHES, NamedCaches.create), expect_handler=no_go_ahead)
    app.router.add_get("/v1/caches", _to(NAMED_CACHES, NamedCaches.list))
    app.router.add_get("/v1/caches/{id}", _to(NAMED_CACHES, NamedCaches.get))
    app.router.add_patch("/v1/caches/{id}", _to(NAMED_CACHES, NamedCaches.renew), expect_handler=no_go_ahead)
    app.router.add_delete("/v1/caches/{id}", _to(NAMED_CACHES, NamedCaches.remove))
    app.router.add_get("/v1/models", _to(MODEL_LIST, ModelList.models))
    app.router.add_get("/v1/models/{model:.+}", _to(MODEL_LIST, ModelList.model))
    app.router.add_get("/health", _to(READINESS, Readiness.health))
    app.router.add_get("/ready", _to(READINESS, Readiness.ready))
    if app[SETTINGS].pass_through:  # last, because it takes all other paths
        app.router.add_post("/v1/{path:.+}", _to(GENERATE, Generate.pass_through), expect_handler=no_go_ahead)


def _to(
    key: web.AppKey[T], method: Callable[[T, web.Request], Awaitable[web.StreamResponse]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that calls `method` of the object at `key`, which exists once the application has started."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await method(request.app[key], request)

    return handle
