"""Settings of the ports: addresses, keys of clients and engines, tenants, TLS."""

from __future__ import annotations

from pydantic import Field

from engine.common.settings import Settings


class ServingSettings(Settings):
    """Where the gateway listens, who may use it, and how it authenticates to engines."""

    config: str | None = Field(None, description="YAML file with any of these settings")

    host: str = Field("127.0.0.1", description="address to listen on; empty: every one, 0.0.0.0: every IPv4 one")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port of /metrics alone, at --host; 0 takes any free one; none: only --admin-port has it",
    )
    admin_host: str = Field(
        "127.0.0.1",
        description="address of --admin-port; empty: every one, 0.0.0.0: every IPv4 one. Everybody who reaches it sees "
        "what the caches hold, and may empty them",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port for operators: the live page /ui, /v1/pods, /v1/route/explain, /reset_prefix_cache and "
        "/metrics, none of which --port has; 0 takes any free one; none: they are not served",
    )
    api_keys_file: str | None = Field(
        None,
        description="file of API keys, one a line, # for comments, read again while running; "
        "none: every client that reaches the gateway may use it",
    )
    tenants_file: str | None = Field(
        None,
        description="YAML file of tenants: their API keys, models and limits, read again while running "
        "(router/tenants/THE_FILE.md); none: no tenants. With --api-keys-file too, its keys belong to tenant default",
    )
    tenant_secret_file: str | None = Field(
        None,
        description="file of the secret, at least 32 bytes and the same on every gateway, for the salts of "
        "tenants with isolation: tenant, read again while running",
    )
    cache_headers: bool = Field(
        True, description="tell clients about pods and caches in headers; a tenant's file entry can switch this off"
    )
    usage_log: str | None = Field(
        None,
        description="folder in which a line of JSON is kept for each request that an engine served, in a file a day; "
        "none: no usage log",
    )
    engine_api_key_file: str | None = Field(
        None,
        description="file of the one API key for engines, read again while running; "
        "none: engines get the client's Authorization header, unless --api-keys-file or --tenants-file is given",
    )
    tls_cert_file: str | None = Field(
        None,
        description="PEM file of the certificate chain that clients see, read again while running; none: plain HTTP. "
        "--metrics-port and --admin-port are plain HTTP either way",
    )
    tls_key_file: str | None = Field(
        None, description="PEM file of the key of --tls-cert-file, without a password, read again while running"
    )
    engine_tls_ca_file: str | None = Field(
        None,
        description="PEM file of the authority that signed the engines' certificates; none: the system's. With this or "
        "another of the engine_tls settings, the gateway uses https for engines that discovery finds",
    )
    engine_tls_cert_file: str | None = Field(
        None, description="PEM file of the certificate chain that engines see; none: they see no certificate"
    )
    engine_tls_key_file: str | None = Field(
        None, description="PEM file of the key of --engine-tls-cert-file, without a password"
    )
    engine_tls_server_name: str | None = Field(
        None, description="name that every engine's certificate must hold; none: the engine's address"
    )

    @property
    def has_client_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys_file or self.tenants_file)

    @property
    def has_engine_tls(self) -> bool:
        """Whether any of the `engine_tls` settings is given."""
        return any(getattr(self, name) for name in type(self).model_fields if name.startswith("engine_tls_"))
