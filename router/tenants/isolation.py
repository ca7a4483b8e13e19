"""Keeps tenants' caches apart: each tenant has a salt, with which prefix keys and engines' block hashes begin.

    tenant key = HMAC-SHA256(cluster secret, the tenant's name, or "" for every tenant that is not isolated)
    salt       = HMAC-SHA256(tenant key, the request's own `cache_salt`, or ""), as 64 hexadecimal digits

HMAC: RFC 2104. Nobody without the secret can find a salt. No salt of a client reaches an engine unchanged, so knowing
another tenant's salt is of no use. Within a tenant `cache_salt` keeps its meaning: another value means another cache.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from engine.common.files import UnusableFile
from router.tenants.tenant import Tenant

MIN_SECRET_BYTES = 32
_SHARED = ""
"""Stands in place of a name; a name is never empty."""


def parse_secret(path: Path, content: bytes) -> bytes:
    """Return the cluster's secret in `content`, the content of `path`. Raises UnusableFile."""
    secret = content.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise UnusableFile(
            f"{path} must hold a secret of at least {MIN_SECRET_BYTES} bytes, e.g. from `openssl rand -hex 32`"
        )
    return secret


class Isolation:
    """The salts of the tenants, derived from one secret."""

    def __init__(self) -> None:
        self._secret = b""
        self._keys: dict[str, bytes] = {}

    @property
    def has_secret(self) -> bool:
        """Whether salts can be made."""
        return bool(self._secret)

    def use(self, secret: bytes) -> None:
        """Use this secret from now on. What is cached under another secret is no longer found."""
        self._secret = secret
        self._keys = {}

    def keep(self, names: Iterable[str]) -> None:
        """Forget the tenants that are not in `names`."""
        kept = {_SHARED, *names}
        self._keys = {name: key for name, key in self._keys.items() if name in kept}

    def salt(self, tenant: Tenant, own_salt: str) -> str:
        """Return the salt of a request of `tenant` that asked for `own_salt`; '': it asked for none."""
        name = tenant.name if tenant.is_isolated else _SHARED
        key = self._keys.get(name)
        if key is None:
            assert self._secret  # without a secret, a file with isolated tenants is refused
            key = self._keys[name] = hmac.digest(self._secret, name.encode(), "sha256")
        return hmac.digest(key, own_salt.encode(), "sha256").hex()
