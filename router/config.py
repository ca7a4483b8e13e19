"""Settings of the gateway: every flag of `warmroute-gateway`, with unit and default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from engine.contract.keys import DEFAULT_STRIDE_BYTES
from engine.contract.settings import Settings, check_redis_url, check_url

PolicyName = Literal[
    "round_robin",
    "least_loaded",
    "prefix_hash",
    "bounded_hash",
    "cache_aware",
    "affinity_groups",
    "predicted_ttft",
]

SPECULATION_TTL_S = 10.0
FOREIGN_TTL_S = 600.0
RETRIES = 2
"""Defaults that the simulation of a gateway shares."""

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")


class GatewaySettings(Settings):
    """Flags, `WARMROUTE_*` environment and YAML keys of the gateway.

    Exit status: 0 after a clean stop, 1 where the port cannot be had, 2 for bad flags or key files.
    """

    config: str | None = Field(None, description="YAML file with any of these settings")

    host: str = Field("127.0.0.1", description="address to listen on; empty: every one, 0.0.0.0: every IPv4 one")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port of /metrics alone; 0 takes any free one; none: on --port with the rest",
    )
    api_keys_file: str | None = Field(
        None,
        description="file of API keys, one a line, # for comments, read again while running; "
        "none: whoever reaches the gateway may use it",
    )
    engine_api_key_file: str | None = Field(
        None,
        description="file of the one API key that engines want, read again while running; "
        "none: engines get the client's Authorization header, unless --api-keys-file is given",
    )
    models: list[str] = Field(
        [],
        description="models that exist even while no engine serves them, comma-separated: then 503, not 404; "
        "those of engines that answered once are known without",
    )
    discovery: Literal["static", "kubernetes", "dns"] = Field(
        "static",
        description="where engines are found: in --engines, among the pods of a Kubernetes namespace, or in DNS",
    )
    engines: list[str] = Field(
        [],
        description="static: base URLs of the engines, comma-separated, e.g. http://10.0.0.7:8000; required",
    )
    kube_selector: str | None = Field(
        None, description="kubernetes: label selector of the engines' pods, e.g. app=engine,tier!=test; required"
    )
    kube_namespace: str | None = Field(
        None, description="kubernetes: namespace of the engines' pods; none: the gateway's own, or the kubeconfig's"
    )
    kube_port: str = Field(
        "http",
        coerce_numbers_to_str=True,
        description="kubernetes: TCP port of the engines, as a number or a containerPort's name; "
        "a pod's annotation warmroute.io/port goes first",
    )
    kube_config: str | None = Field(
        None, description="kubernetes: kubeconfig file whose current context is used; none: the pod's service account"
    )
    dns_name: str | None = Field(
        None, description="dns: name whose A or AAAA records are the engines, e.g. a headless Service's; required"
    )
    dns_port: int = Field(8000, ge=1, le=65535, description="dns: TCP port of the engines")
    dns_max_ttl_s: float = Field(
        5.0, ge=1, description="dns: seconds after which the name is asked for again; sooner where its TTL is shorter"
    )
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
    shadow_policies: list[PolicyName] = Field(
        [],
        json_schema_extra={"uniqueItems": True},
        description="policies, comma-separated, that are asked about every request beside --policy and never followed: "
        "metrics tell what each would choose as caches and loads are under --policy, not what they would be under it; "
        "that, warmroute-loadgen compare and simulate tell",
    )
    hash_depth_strides: int = Field(8, ge=1, description="strides of the prompt that prefix_hash and bounded_hash hash")
    load_bound: float = Field(
        1.25, gt=1, description="load a pod may have relative to the mean, for bounded_hash and affinity_groups"
    )
    speculation_ttl_s: float = Field(
        SPECULATION_TTL_S,
        gt=0,
        description="seconds a routed prefix counts as held by a pod that publishes to the registry",
    )
    foreign_ttl_s: float = Field(
        FOREIGN_TTL_S, gt=0, description="seconds a routed prefix counts as held by a pod that publishes nothing"
    )

    connect_timeout_s: float = Field(2.0, gt=0, description="seconds to connect to an engine")
    first_byte_timeout_s: float = Field(120.0, gt=0, description="seconds of one attempt until its first body byte")
    idle_timeout_s: float = Field(60.0, gt=0, description="seconds a started answer may stay silent")
    total_timeout_s: float = Field(900.0, gt=0, description="seconds for the whole request, retries included")
    retries: int = Field(RETRIES, ge=0, le=10, description="further pods to try while nothing was sent to the client")
    max_in_flight: int = Field(4096, ge=1, description="requests in flight; one more is answered 429")
    max_in_flight_body_mib: int = Field(
        128,
        ge=1,
        description="MiB of request bodies in flight; one that does not fit is answered 429; at least --max-body-bytes",
    )
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
        cleaned = [url.strip().rstrip("/") for url in urls]
        for url in cleaned:
            check_url(url, ("http", "https"))
            if "@" in urlsplit(url).netloc:
                raise ValueError(
                    f"{url!r} must not hold a user or a password: answers, metrics and logs show where engines are. "
                    "--engine-api-key-file gives the key that engines want"
                )
        _check_unique(cleaned)
        return cleaned

    @field_validator("shadow_policies")
    @classmethod
    def _check_shadow_policies(cls, names: list[PolicyName]) -> list[PolicyName]:
        _check_unique(names)
        return names

    @field_validator("kube_port")
    @classmethod
    def _check_kube_port(cls, port: str) -> str:
        is_valid = 0 < int(port) < 65536 if port.isdecimal() else PORT_NAME.fullmatch(port)
        if not is_valid:
            raise ValueError("must be a number from 1 to 65535 or a port's name")
        return port

    @field_validator("kube_namespace")
    @classmethod
    def _check_kube_namespace(cls, name: str | None) -> str | None:
        if name is not None and not DNS_LABEL.fullmatch(name):
            raise ValueError("is not the name of a namespace")
        return name

    @property
    def max_in_flight_body_bytes(self) -> int:
        """`max_in_flight_body_mib` in bytes."""
        return self.max_in_flight_body_mib * 2**20

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        required = {"static": "engines", "kubernetes": "kube_selector", "dns": "dns_name"}
        prefixes = {"static": "engines", "kubernetes": "kube_", "dns": "dns_"}
        for kind, prefix in prefixes.items():
            given = sorted(name for name in self.model_fields_set if name.startswith(prefix))
            if kind != self.discovery and given:
                raise ValueError(f"{_flag(given[0])} needs --discovery {kind}, which is {self.discovery}")
        name = required[self.discovery]
        if not getattr(self, name):
            about = type(self).model_fields[name].description
            raise ValueError(f"{_flag(name)} is required with --discovery {self.discovery} ({about})")
        return self

    @model_validator(mode="after")
    def _check_shadows_differ(self) -> Self:
        if self.policy in self.shadow_policies:
            raise ValueError(
                f"--shadow-policies has {self.policy}, which is the --policy that acts: leave it out, or act by another"
            )
        return self

    @model_validator(mode="after")
    def _check_bodies(self) -> Self:
        if self.max_in_flight_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"--max-in-flight-body-mib {self.max_in_flight_body_mib} has no room for one body of --max-body-bytes "
                f"{self.max_body_bytes}"
            )
        return self

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        return url if url is None else check_redis_url(url)


def _check_unique(values: Sequence[str]) -> None:
    if twice := {value for value in values if values.count(value) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is listed twice: once is enough")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
