"""API keys: which clients and gateways may use an engine."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.common.api_keys import authorization_of, digest_of, digest_shown
from engine.contract.errors import BadRequest

OPEN_PATHS = frozenset(("/health", "/metrics"))
"""Paths for kubelets and Prometheus, which have no key."""


class Unauthorized(BadRequest):
    """401: there is no key, or it is not valid."""

    status = 401


class ApiKeys:
    """The keys of --api-key-file."""

    def __init__(self) -> None:
        self._digests: frozenset[bytes] = frozenset()

    def use(self, keys: Sequence[str]) -> None:
        """Replace the valid keys."""
        self._digests = frozenset(map(digest_of, keys))

    def check(self, authorization: str | None) -> None:
        """Accept `Bearer` with one of the keys. Raises Unauthorized."""
        if authorization is None:
            raise Unauthorized(
                "no API key given: send the header 'Authorization: Bearer KEY', or x-api-key", code="missing_api_key"
            )
        if digest_shown(authorization) not in self._digests:
            raise Unauthorized("the API key is not valid here", code="invalid_api_key")


def require_key(keys: ApiKeys) -> Middleware:
    """Return a middleware that requires a key for all paths except OPEN_PATHS."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            keys.check(authorization_of(request.headers))
        return await handler(request)

    return check
