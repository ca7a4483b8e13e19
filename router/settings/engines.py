"""Settings of the connections to engines: key, TLS, metrics, KV events."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.common.settings import Settings, check_bind_address, check_both, group


@group("Talking to engines", common=("engine_api_key_file", "kv_events_port"))
class EngineSideSettings(Settings):
    """How the gateway talks to engines."""

    engine_api_key_file: str | None = Field(
        None,
        description="the one API key that engines ask for, read again when it changes; none: engines get the client's "
        "Authorization header, unless clients' keys are checked here",
    )
    engine_tls_ca_file: str | None = Field(
        None,
        description="PEM of the authority that signed the engines' certificates; none: the system's. Any of the "
        "engine-tls settings makes the gateway use https for engines that it finds",
    )
    engine_tls_cert_file: str | None = Field(
        None, description="PEM of the certificate chain that engines see, if they ask for one"
    )
    engine_tls_key_file: str | None = Field(
        None, description="PEM of the key of --engine-tls-cert-file, without a password"
    )
    engine_tls_server_name: str | None = Field(
        None, description="name in every engine's certificate, if engines are reached by IP address"
    )
    engine_metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the engines' /metrics if it is not that of their API; 0, where it costs too much: do not "
        "read them, and know no KV capacity, no ranks and no requests of others",
    )
    engine_priority: Literal["none", "vllm", "sglang"] = Field(
        "none",
        description="engines that schedule by priority get that of x-warmroute-priority in the body: vllm: lower is "
        "sooner, sglang: higher is sooner",
    )
    kv_events_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="for fixed addresses: port of the KV events of vLLM or SGLang (--kv-events-config), plus the rank; "
        "0: what engine or pod says",
    )
    kv_events_replay_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port at which missed KV events are asked for (replay_endpoint), plus the rank; without it, a "
        "missed event makes the gateway forget what the engine holds",
    )
    kv_events_bind: str | None = Field(
        None,
        description="for engines that connect to publish KV events: ZMQ address such as tcp://*:5557 at which this "
        "gateway, the only one, waits for them",
    )

    @field_validator("kv_events_bind")
    @classmethod
    def _check_kv_events_bind(cls, address: str | None) -> str | None:
        return address if address is None else check_bind_address(address)

    @model_validator(mode="after")
    def _check_engine_side(self) -> Self:
        check_both(self, "engine_tls_cert_file", "engine_tls_key_file")
        if self.kv_events_replay_port and not self.kv_events_port and self.kv_events_bind is None:
            raise ValueError("--kv-events-replay-port needs --kv-events-port")
        return self

    @property
    def has_engine_tls(self) -> bool:
        """Whether any of the `engine_tls` settings is given."""
        return any(
            (self.engine_tls_ca_file, self.engine_tls_cert_file, self.engine_tls_key_file, self.engine_tls_server_name)
        )
