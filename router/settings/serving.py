"""Settings of the ports: addresses, keys of clients and engines, tenants, TLS."""

from __future__ import annotations

from pydantic import Field

from engine.contract.settings import Settings


class ServingSettings(Settings):
    """Where the gateway is reached, by whom, and how it shows itself to engines."""

    config: str | None = Field(None, description="YAML file with any of these settings")

    host: str = Field("127.0.0.1", description="address to listen on; empty: every one, 0.0.0.0: every IPv4 one")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port of /metrics alone, at --host; 0 takes any free one; none: it is on --admin-port alone",
    )
    admin_host: str = Field(
        "127.0.0.1",
        description="address of --admin-port; empty: every one, 0.0.0.0: every IPv4 one. Whoever reaches it sees what "
        "lies in the caches, and may empty them",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port for operators: the live page /ui, /v1/pods, /v1/route/explain, /reset_prefix_cache and "
        "/metrics, which --port has none of; 0 takes any free one; none: they are not served",
    )
    api_keys_file: str | None = Field(
        None,
        description="file of API keys, one a line, # for comments, read again while running; "
        "none: whoever reaches the gateway may use it",
    )
    tenants_file: str | None = Field(
        None,
        description="YAML file of tenants: their API keys, models and limits, read again while running "
        "(router/tenants/README.md); none: no tenants. With --api-keys-file too, its keys are the tenant default's",
    )
    tenant_secret_file: str | None = Field(
        None,
        description="file of the secret, at least 32 bytes and the same on every gateway, from which the salts of "
        "tenants with isolation: tenant are made, read again while running",
    )
    cache_headers: bool = Field(
        True, description="tell clients of pods and caches in headers; each tenant's file entry may say no as well"
    )
    usage_log: str | None = Field(
        None,
        description="folder in which a line of JSON is kept for each request that an engine served, in a file a day; "
        "none: no usage log",
    )
    engine_api_key_file: str | None = Field(
        None,
        description="file of the one API key that engines want, read again while running; "
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
        "another of the engine_tls settings, engines that discovery finds are spoken to by https",
    )
    engine_tls_cert_file: str | None = Field(
        None, description="PEM file of the certificate chain that engines are shown; none: they are shown none"
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
