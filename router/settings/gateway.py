"""Settings of the gateway: every flag of `warmroute-gateway`, with unit and default."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from engine.common.log_lines import Format
from engine.common.settings import check_bind_address, check_redis_url, check_unique, flag_of
from engine.contract.keys import DEFAULT_STRIDE_BYTES
from router.fleet.targets import MAX_RANKS
from router.settings.discovery import DiscoverySettings
from router.settings.named_caches import NamedCacheSettings
from router.settings.names import NameSettings
from router.settings.picker import PickerSettings
from router.settings.serving import ServingSettings

PolicyName = Literal[
    "round_robin", "least_loaded", "prefix_hash", "bounded_hash", "cache_aware", "affinity_groups", "predicted_ttft"
]

SPECULATION_TTL_S = 10.0
FOREIGN_TTL_S = 600.0
RETRIES = 2
"""Defaults that the simulation of a gateway shares."""


class GatewaySettings(NameSettings, NamedCacheSettings, DiscoverySettings, PickerSettings, ServingSettings):
    """Flags, `WARMROUTE_*` environment and YAML keys of the gateway.

    Other commands: `warmroute-gateway keys make NAME` prints a new API key for a tenant, and `warmroute-gateway top`
    shows a running gateway.

    Traces are sent if the standard OTEL_* variables ask for them (engine/common/otel/README.md).

    Exit status: 0 after a clean stop, 1 if a port is not available or a background task has died, 2 for bad flags or
    key files.
    """

    model_config = SettingsConfigDict(allow_inf_nan=False)

    redis_url: str | None = Field(
        None,
        description="redis://, rediss:// or unix:// URL of the registry, or "
        "redis+sentinel://HOST:26379,HOST:26379/MASTER; none: no registry",
    )
    stride: int = Field(
        DEFAULT_STRIDE_BYTES, ge=16, le=65536, description="bytes per prefix key; the same on every engine and gateway"
    )
    lease_s: float = Field(
        15.0, gt=0, description="seconds of silence after which a pod's registry entries are dropped"
    )
    share_beliefs: bool = Field(
        True,
        description="with --redis-url: gateways share what they know of engines that publish nothing",
    )
    warm_timeout_s: float = Field(
        5.0,
        ge=0,
        description="seconds that readiness waits for the registry and for what other gateways know",
    )

    policy: PolicyName = Field("predicted_ttft", description="routing policy")
    allow_policy_header: bool = Field(
        False, description="let a request choose its policy with the header x-warmroute-policy"
    )
    shadow_policies: list[PolicyName] = Field(
        [],
        json_schema_extra={"uniqueItems": True},
        description="policies, comma-separated, that are asked about every request beside --policy and never followed: "
        "metrics show what each would choose with the caches and loads that --policy leads to. To see what caches and "
        "loads the policy itself would lead to, use warmroute-loadgen compare and simulate",
    )
    hash_depth_strides: int = Field(8, ge=1, description="strides of the prompt that prefix_hash and bounded_hash hash")
    load_bound: float = Field(
        1.25, gt=1, description="highest load of a pod relative to the mean, for bounded_hash and affinity_groups"
    )
    speculation_ttl_s: float = Field(
        SPECULATION_TTL_S,
        gt=0,
        description="seconds a routed prefix counts as held by a pod that publishes to the registry",
    )
    foreign_ttl_s: float = Field(
        FOREIGN_TTL_S,
        gt=0,
        description="seconds a routed prefix counts as held by a pod that publishes nothing and does not report its KV "
        "capacity",
    )

    kv_events: bool = Field(
        True,
        description="follow the KV events of engines whose ports are known: from the engine's /kv_event_sources, from "
        "a pod's annotations warmroute.io/kv-events-port and warmroute.io/kv-events-replay-port, or from "
        "--kv-events-port; false: estimate what such engines hold from the requests that they get",
    )
    kv_events_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port at which every engine publishes KV events over ZMQ, as set in vLLM's and SGLang's "
        "--kv-events-config; rank r of an engine is at this port + r. 0: the port that the engine or its pod names",
    )
    kv_events_replay_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port at which every engine replays KV events that were missed (replay_endpoint of "
        "--kv-events-config); rank r is at this port + r. 0: the port that the engine or its pod names. Without it, a "
        "gateway that misses an event forgets what the engine holds",
    )
    kv_events_topic: str = Field(
        "", description="topic, or its beginning, of the KV events that are followed; empty: all that engines publish"
    )
    kv_events_bind: str | None = Field(
        None,
        description="ZMQ address, such as tcp://*:5557, at which the gateway waits for engines that connect to publish "
        "their KV events; an engine is identified by its IP address, or by HOST:PORT between two @ in its topic. "
        "none: the gateway connects to engines. Only for a single gateway, because an engine connects to one",
    )

    connect_timeout_s: float = Field(2.0, gt=0, description="seconds to connect to an engine")
    first_byte_timeout_s: float = Field(120.0, gt=0, description="seconds from an attempt to its first body byte")
    idle_timeout_s: float = Field(60.0, gt=0, description="seconds a started answer may stay silent")
    total_timeout_s: float = Field(900.0, gt=0, description="seconds for the whole request, retries included")
    retries: int = Field(RETRIES, ge=0, le=10, description="further pods to try while nothing was sent to the client")
    hedge_after_s: float = Field(
        0.0,
        ge=0,
        description="seconds without a byte of a stream, and at least twice its predicted time to the first token, "
        "after which a second engine is asked too; the first to answer serves the client. The second attempt counts "
        "as one of --retries, and at most 2 % of the requests get one. A good value is the p99 of the time to the "
        "first byte. 0: never",
    )
    queue_timeout_s: float = Field(
        10.0,
        ge=0,
        description="seconds after its arrival that a request may wait while every engine of its model is saturated; "
        "a request that would wait longer is answered 429, at once if that is predicted. 0: requests never wait, "
        "engines queue them",
    )
    queue_requests: int = Field(
        1024, ge=1, description="requests of one model that may wait; beyond that, the least urgent is answered 429"
    )
    queue_mib: int = Field(64, ge=1, description="MiB of the bodies of one model's requests that may wait")
    max_pod_requests: int = Field(
        0,
        ge=0,
        description="requests that one engine gets at a time, those of other gateways included if it reports them; "
        "0: as many as the engine turns out to run at once. With fewer, each answer is faster. Needs --queue-timeout-s",
    )
    activation_timeout_s: float = Field(
        0.0,
        ge=0,
        description="seconds after its arrival that a request for a known model may wait until an engine serves it, "
        "within the bounds of the queue; 0: it is answered 503 at once",
    )
    engine_priority: Literal["none", "vllm", "sglang"] = Field(
        "none",
        description="how a request's priority (header x-warmroute-priority) is passed to engines, in the body's field "
        "priority, replacing a client's own: vllm: lower is sooner; sglang: higher is sooner; none: not at all",
    )
    resume_streams: bool = Field(
        True,
        description="when a pod breaks a stream, ask another one for the rest if the request allows it; false: the "
        "stream ends in an error event",
    )
    max_in_flight: int = Field(4096, ge=1, description="requests in flight; one more is answered 429")
    max_in_flight_body_mib: int = Field(
        128,
        ge=1,
        description="MiB of request bodies in flight; one that does not fit is answered 429; at least --max-body-bytes",
    )
    max_in_flight_answer_mib: int = Field(
        128,
        ge=1,
        description="MiB of answers that are kept until they are whole, so that another pod can replace a pod that "
        "dies; answers that do not fit, or have more than 1 MiB, are passed on as they come",
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="largest request body in bytes; more is answered 413")
    max_upload_mib: int = Field(
        100,
        ge=1,
        description="MiB of a form with a recording (/v1/audio/transcriptions, /v1/audio/translations), which is sent "
        "to an engine as it comes; more is answered 413. At most --max-body-bytes are held until the field model comes",
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="seconds in which a request's body must arrive; later is answered 408"
    )
    body_min_rate: int = Field(
        4096,
        ge=0,
        description="least bytes/s of a request's body, on average over each 5 s; slower is answered 408; 0: no bound",
    )
    max_connections: int = Field(
        8192,
        ge=1,
        description="connections of clients that may be open; one more is answered 503. Each may need two of the "
        "process's file descriptors",
    )
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds from the first byte of a request to the end of its headers; later is answered 408",
    )
    keepalive_timeout_s: float = Field(
        75.0,
        gt=0,
        description="seconds that a client's connection may stay open without a request; "
        "set it above the idle timeout of a load balancer in front",
    )
    drain_delay_s: float = Field(
        0.0, ge=0, description="seconds that new requests are still taken after SIGTERM, while /ready answers 503"
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="seconds that started answers may take to finish on SIGTERM")

    engine_metrics: bool = Field(
        True,
        description="read the metrics of vLLM and SGLang once a second, or less often if that takes much of an "
        "engine's time. The metrics show other gateways' requests, KV capacity, data-parallel ranks and loaded "
        "adapters. The bundled engine publishes these to the registry",
    )
    engine_metrics_path: str = Field(
        "/metrics", pattern=r"^/[^\s?#]*$", description="path of the engines' metrics, with no query"
    )
    engine_metrics_port: int | None = Field(
        None, ge=1, le=65535, description="TCP port of the engines' metrics; none: that of their API"
    )
    engine_ranks: int | None = Field(
        None,
        ge=1,
        le=MAX_RANKS,
        description="data-parallel ranks of every engine, each a separate target, named in X-data-parallel-rank; the "
        "annotation warmroute.io/ranks overrides it. 1: each engine assigns requests to its ranks itself; none: as its "
        "metrics tell",
    )
    probe_interval_s: float = Field(
        2.0, gt=0, description="seconds between two probes of an engine, plus or minus 20 % at random"
    )
    probe_timeout_s: float = Field(2.0, gt=0, description="seconds an engine has to answer a probe")
    eject_after: int = Field(3, ge=1, description="consecutive failures after which an engine gets no requests")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level to log")
    log_format: Format = Field(
        "text",
        description="format of log lines on stderr: text, or json with one object a line; lines of requests are json "
        "either way",
    )
    log_requests: bool = Field(False, description="log one JSON line per finished request to stderr")

    @field_validator("shadow_policies")
    @classmethod
    def _check_shadow_policies(cls, names: list[PolicyName]) -> list[PolicyName]:
        check_unique(names)
        return names

    @property
    def max_in_flight_body_bytes(self) -> int:
        """`max_in_flight_body_mib` in bytes."""
        return self.max_in_flight_body_mib * 2**20

    @property
    def max_in_flight_answer_bytes(self) -> int:
        """`max_in_flight_answer_mib` in bytes."""
        return self.max_in_flight_answer_mib * 2**20

    @model_validator(mode="after")
    def _check_queue(self) -> Self:
        if self.max_pod_requests and not self.queue_timeout_s:
            raise ValueError("--max-pod-requests needs --queue-timeout-s: requests beyond it have to wait")
        return self

    @model_validator(mode="after")
    def _check_hedges(self) -> Self:
        if self.hedge_after_s and not self.retries:
            raise ValueError("--hedge-after-s needs --retries: the second engine is a further one to try")
        if self.hedge_after_s >= self.first_byte_timeout_s:
            raise ValueError(
                "--hedge-after-s must be less than --first-byte-timeout-s, when the first engine is given up"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        for cert, key in (("tls_cert_file", "tls_key_file"), ("engine_tls_cert_file", "engine_tls_key_file")):
            for given, missing in ((cert, key), (key, cert)):
                if getattr(self, given) and not getattr(self, missing):
                    raise ValueError(f"{flag_of(given)} needs {flag_of(missing)}")
        plain = [url for url in self.engines if url.startswith("http:")]
        if self.has_engine_tls and plain:
            raise ValueError(f"--engines has {plain[0]}, which is not https, but the engine_tls settings need https")
        return self

    @model_validator(mode="after")
    def _check_shadows_differ(self) -> Self:
        if self.policy in self.shadow_policies:
            raise ValueError(
                f"--shadow-policies has {self.policy}, which is the --policy that acts: leave it out, or choose another"
            )
        return self

    @model_validator(mode="after")
    def _check_room_and_admin(self) -> Self:
        if self.max_in_flight_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"--max-in-flight-body-mib {self.max_in_flight_body_mib} has no room for one body of --max-body-bytes "
                f"{self.max_body_bytes}"
            )
        if "admin_host" in self.model_fields_set and self.admin_port is None:
            raise ValueError("--admin-host needs --admin-port")
        return self

    @field_validator("kv_events_bind")
    @classmethod
    def _check_kv_events_bind(cls, address: str | None) -> str | None:
        return address if address is None else check_bind_address(address)

    @model_validator(mode="after")
    def _check_kv_events(self) -> Self:
        given = sorted(name for name in self.model_fields_set if name.startswith("kv_events_") and getattr(self, name))
        if given and not self.kv_events:
            raise ValueError(f"{flag_of(given[0])} needs --kv-events, which is false")
        if self.kv_events_replay_port and not self.kv_events_port and self.kv_events_bind is None:
            raise ValueError("--kv-events-replay-port needs --kv-events-port")
        return self

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        return url if url is None else check_redis_url(url)
