"""Who may have an engine compute: API keys, which clients and gateways show."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.contract.api_keys import authorization_of, digest_of, digest_shown
from engine.contract.errors import BadRequest

OPEN_PATHS = frozenset(("/health", "/metrics"))
"""For kubelets and Prometheus, which have no key."""


class Unauthorized(BadRequest):
    """401: no key, or none that is valid."""

    status = 401


class ApiKeys:
    """The keys of --api-key-file."""

    def __init__(self) -> None:
        self._digests: frozenset[bytes] = frozenset()

    def use(self, keys: Sequence[str]) -> None:
        """From now on these, and no others."""
        self._digests = frozenset(map(digest_of, keys))

    def check(self, authorization: str | None) -> None:
        """Return for `Bearer` and one of the keys. Raises Unauthorized."""
        if authorization is None:
            raise Unauthorized(
                "no API key given: send the header 'Authorization: Bearer KEY', or x-api-key", code="missing_api_key"
            )
        if digest_shown(authorization) not in self._digests:
            raise Unauthorized("the API key is not valid here", code="invalid_api_key")


def require_key(keys: ApiKeys) -> Middleware:
    """A middleware that lets nothing but OPEN_PATHS pass without a key."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            keys.check(authorization_of(request.headers))
        return await handler(request)

    return check
