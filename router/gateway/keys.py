"""Who may ask: API keys in a file, as a mounted Secret has them, and those of the tenants' file."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.contract.api_keys import authorization_of, digest_of, digest_shown
from router.gateway.errors import Unauthorized
from router.tenants.tenant import DEFAULT, Tenant, TenantKey

OPEN_PATHS = frozenset(("/health", "/ready"))
"""For kubelets, which have no key; nothing there tells of requests or caches."""
KEY_ID_CHARS = 12
TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)
"""Where a request keeps whose key it showed."""


class ExpiredKey(Unauthorized):
    """401: the key was valid until some time ago. `tenant`: whose it was."""

    def __init__(self, tenant: Tenant, expired_s: float) -> None:
        when = datetime.fromtimestamp(expired_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        super().__init__(f"the API key expired on {when}: ask for a new one", code="expired_api_key")
        self.tenant = tenant


class ClientKeys:
    """The keys that clients may show, and whose they are."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._clock = clock
        self._plain: frozenset[bytes] = frozenset()
        self._tenants: Sequence[Tenant] = ()
        self._owners: dict[bytes, tuple[Tenant, TenantKey]] = {}

    def use(self, keys: Sequence[str]) -> None:
        """From now on these of the file that names no tenants, and no others of it."""
        self._plain = frozenset(map(digest_of, keys))
        self._join()

    def use_tenants(self, tenants: Sequence[Tenant]) -> None:
        """From now on the keys of these tenants, and of no others."""
        self._tenants = tenants
        self._join()

    def _join(self) -> None:
        default = next((tenant for tenant in self._tenants if tenant.name == DEFAULT.name), DEFAULT)
        self._owners = {digest: (default, TenantKey(digest)) for digest in self._plain}
        self._owners |= {key.digest: (tenant, key) for tenant in self._tenants for key in tenant.keys}

    def admit(self, authorization: str | None) -> Tenant:
        """Whose key it is, for `Bearer` and one of the keys. Raises Unauthorized."""
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
    """Who asks."""
    tenant: Tenant = request.get(TENANT, DEFAULT)
    return tenant


def key_id_of(request: web.Request) -> str | None:
    """The beginning of the SHA-256 of the key that was shown, in hex; None where no key is asked for.

    The tenants' file has the whole of it, so whose key it was can be found, and the key cannot.
    """
    shown = authorization_of(request.headers) if TENANT in request else None
    digest = None if shown is None else digest_shown(shown)
    return None if digest is None else digest.hex()[:KEY_ID_CHARS]


def require_key(keys: ClientKeys, on_refusal: Callable[[Unauthorized], None]) -> Middleware:
    """A middleware that lets nothing but OPEN_PATHS pass without a key, and notes whose it is."""

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
