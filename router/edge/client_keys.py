"""API keys of clients, from a file such as a mounted Secret, and from the tenants' file."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.common.api_keys import authorization_of, digest_of, digest_shown
from router.edge.errors import Unauthorized
from router.telemetry.metrics import Metrics
from router.tenants.tenant import DEFAULT, Tenant, TenantKey

OPEN_PATHS = frozenset(("/health", "/ready"))
"""Paths open without a key, for kubelets, which have none. They reveal nothing of requests or caches."""
KEY_ID_CHARS = 12
TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)
"""The request's entry for the tenant whose key it showed."""


class ExpiredKey(Unauthorized):
    """401: the key has expired. `tenant`: its owner."""

    def __init__(self, tenant: Tenant, expired_s: float) -> None:
        when = datetime.fromtimestamp(expired_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        super().__init__(f"the API key expired on {when}: ask for a new one", code="expired_api_key")
        self.tenant = tenant


class ClientKeys:
    """The keys that clients may show, and the tenants that own them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._clock = clock
        self._plain: frozenset[bytes] = frozenset()
        self._tenants: Sequence[Tenant] = ()
        self._owners: dict[bytes, tuple[Tenant, TenantKey]] = {}

    def use(self, keys: Sequence[str]) -> None:
        """Replace the keys of the file that names no tenants."""
        self._plain = frozenset(map(digest_of, keys))
        self._join()

    def use_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Replace the tenants and their keys."""
        self._tenants = tenants
        self._join()

    def _join(self) -> None:
        default = next((tenant for tenant in self._tenants if tenant.name == DEFAULT.name), DEFAULT)
        self._owners = {digest: (default, TenantKey(digest)) for digest in self._plain}
        self._owners |= {key.digest: (tenant, key) for tenant in self._tenants for key in tenant.keys}

    def count_tenants(self) -> int:
        """Return how many tenants there are, including the one of keys that name none."""
        return len({tenant.name for tenant in self._tenants} | ({DEFAULT.name} if self._plain else set())) or 1

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of that name; None if there is none."""
        return next(
            (tenant for tenant in self._tenants if tenant.name == name), DEFAULT if name == DEFAULT.name else None
        )

    def admit(self, authorization: str | None) -> Tenant:
        """Return the owner of the key in `authorization`, which must be `Bearer` and a key. Raises Unauthorized."""
        if authorization is None:
            raise Unauthorized(
                "no API key given: send the header 'Authorization: Bearer KEY', or x-api-key", code="missing_api_key"
            )
        digest = digest_shown(authorization)
        found = None if digest is None else self._owners.get(digest)
        if found is None:
            raise Unauthorized("the API key is not valid here", code="invalid_api_key")
        tenant, key = found
        if key.expires_s is not None and self._clock() >= key.expires_s:
            raise ExpiredKey(tenant, key.expires_s)
        return tenant


def tenant_of(request: web.Request) -> Tenant:
    """Return the tenant that sent the request."""
    tenant: Tenant = request.get(TENANT, DEFAULT)
    return tenant


def counting_refusals(metrics: Metrics) -> Callable[[Unauthorized], None]:
    """Return a function that counts refused requests."""

    def refused(error: Unauthorized) -> None:
        metrics.answers.unauthorized()
        if isinstance(error, ExpiredKey):
            metrics.tenants.refused(error.tenant.name, "expired")

    return refused


def key_id_of(request: web.Request) -> str | None:
    """Return the beginning of the SHA-256 of the key that was shown, in hex; None if no key is required.

    The tenants' file has the whole hashes, so the beginning shows the owner, but not the key.
    """
    return key_id_shown(authorization_of(request.headers) if TENANT in request else None)


def client_of(request: web.Request) -> tuple[str | None, str]:
    """Return the id of the key that a request showed, and the client's address."""
    return key_id_of(request), request.remote or ""


def key_id_shown(shown: str | None) -> str | None:
    """Return the same as `key_id_of` for an Authorization header."""
    digest = None if shown is None else digest_shown(shown)
    return None if digest is None else digest.hex()[:KEY_ID_CHARS]


def require_key(keys: ClientKeys, on_refusal: Callable[[Unauthorized], None]) -> Middleware:
    """Return a middleware that lets only OPEN_PATHS pass without a key, and notes the key's owner."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            try:
                request[TENANT] = keys.admit(authorization_of(request.headers))
            except Unauthorized as error:
                on_refusal(error)
                raise
        return await handler(request)

    return check
