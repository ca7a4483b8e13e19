"""Settings of the gateway: every flag of `warmroute-gateway`, with unit and default."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from engine.contract.keys import DEFAULT_STRIDE_BYTES
from engine.contract.settings import Settings

PolicyName = Literal[
    "round_robin",
    "least_loaded",
    "prefix_hash",
    "bounded_hash",
    "cache_aware",
    "affinity_groups",
    "predicted_ttft",
]


class GatewaySettings(Settings):
    """Flags, `WARMROUTE_*` environment and YAML keys of the gateway."""

    config: str | None = Field(None, description="YAML file with any of these settings")

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one")
    engines: list[str] = Field(description="base URLs of the engines, comma-separated, e.g. http://10.0.0.7:8000")
    redis_url: str | None = Field(
        None, description="redis://, rediss:// or unix:// URL of the registry; none: no registry"
    )
    stride: int = Field(
        DEFAULT_STRIDE_BYTES, ge=16, le=65536, description="bytes per prefix key; the same on every engine and gateway"
    )
    lease_s: float = Field(
        15.0, gt=0, description="seconds of silence after which a pod's registry entries are dropped"
    )
    warm_timeout_s: float = Field(
        5.0, ge=0, description="seconds that readiness waits for the registry before going on without it"
    )

    policy: PolicyName = Field("predicted_ttft", description="routing policy")
    allow_policy_header: bool = Field(
        False, description="let a request choose its policy with the header x-warmroute-policy"
    )
    hash_depth_strides: int = Field(8, ge=1, description="strides of the prompt that prefix_hash and bounded_hash hash")
    load_bound: float = Field(
        1.25, gt=1, description="load a pod may have relative to the mean, for bounded_hash and affinity_groups"
    )
    speculation_ttl_s: float = Field(
        10.0, gt=0, description="seconds a routed prefix counts as held by a pod that publishes to the registry"
    )
    foreign_ttl_s: float = Field(
        600.0, gt=0, description="seconds a routed prefix counts as held by a pod that publishes nothing"
    )

    connect_timeout_s: float = Field(2.0, gt=0, description="seconds to connect to an engine")
    first_byte_timeout_s: float = Field(120.0, gt=0, description="seconds of one attempt until its first body byte")
    idle_timeout_s: float = Field(60.0, gt=0, description="seconds a started answer may stay silent")
    total_timeout_s: float = Field(900.0, gt=0, description="seconds for the whole request, retries included")
    retries: int = Field(2, ge=0, le=10, description="further pods to try while nothing was sent to the client")
    max_in_flight: int = Field(4096, ge=1, description="requests in flight; one more is answered 429")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="largest request body in bytes; more is answered 413")
    drain_delay_s: float = Field(
        0.0, ge=0, description="seconds that new requests are still taken after SIGTERM, while /ready answers 503"
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="seconds that started answers may take to finish on SIGTERM")

    probe_interval_s: float = Field(
        2.0, gt=0, description="seconds between two probes of an engine, plus or minus 20 % at random"
    )
    probe_timeout_s: float = Field(2.0, gt=0, description="seconds an engine has to answer a probe")
    eject_after: int = Field(3, ge=1, description="consecutive failures after which an engine gets no requests")

    enable_admin: bool = Field(False, description="serve POST /reset_prefix_cache, which empties every engine's cache")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level to log")
    log_requests: bool = Field(False, description="log one JSON line per finished request to stderr")

    @field_validator("engines")
    @classmethod
    def _check_engines(cls, urls: list[str]) -> list[str]:
        if not urls:
            raise ValueError("at least one engine URL is needed")
        cleaned = [url.strip().rstrip("/") for url in urls]
        for url in cleaned:
            _check_url(url, ("http", "https"))
        twice = {url for url in cleaned if cleaned.count(url) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} is listed twice")
        return cleaned

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        if url is not None:
            _check_url(url, ("redis", "rediss", "unix"))
        return url


def _check_url(url: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    allowed = " or ".join(f"{scheme}://" for scheme in schemes)
    if parts.scheme not in schemes:
        raise ValueError(f"{url!r} must begin with {allowed}")
    if parts.scheme == "unix":
        return
    if not parts.hostname or port == 0:
        raise ValueError(f"{url!r} must name a host, as in {schemes[0]}://host:port")
    if parts.scheme in ("http", "https") and (parts.query or parts.fragment):
        raise ValueError(f"{url!r} must not have a query or a fragment")
