"""Settings of named caches: how many a tenant may have, and for how long."""

from __future__ import annotations

from pydantic import Field

from engine.common.settings import Settings


class NamedCacheSettings(Settings):
    """Bounds of what clients store at `/v1/caches`."""

    named_caches: int = Field(
        100,
        ge=0,
        le=10_000,
        description="named caches (/v1/caches) that a tenant may have at a time, in Redis if --redis-url is given, "
        "else in this gateway's memory; 0: none",
    )
    named_cache_mib: int = Field(
        64,
        ge=1,
        le=65_536,
        description="MiB of contents that a tenant's named caches may have together; with Redis also the MiB of "
        "all tenants' contents that this gateway keeps in memory",
    )
    named_cache_max_ttl_s: float = Field(
        604_800.0, ge=1, le=31_536_000, description="longest time to live of a named cache, in seconds"
    )
