"""Settings of the port for clients: address, TLS, keys, tenants."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.common.settings import HasEffect, Settings, check_both, group


@group(
    "Clients and keys",
    common=("host", "port", "api_keys_file", "tenants_file", "tls_cert_file", "tls_key_file", "usage_log"),
)
class ClientSettings(Settings):
    """Where the gateway listens, and who may use it."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: every IPv4 address; empty: every one")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0: any free one")
    api_keys_file: str | None = Field(
        None,
        description="API keys, one a line, that clients must show; read again when it changes; none: no key needed",
    )
    tenants_file: str | None = Field(
        None,
        description="YAML of tenants with keys, models and limits, for several customers or teams "
        "(router/tenants/THE_FILE.md); read again when it changes",
    )
    tenant_secret_file: Annotated[
        str | None,
        HasEffect(
            lambda given: given.tenants_file is not None, "only tenants have isolation, and they need --tenants-file"
        ),
    ] = Field(
        None,
        description="secret of 32 bytes or more, the same on every gateway, for tenants with isolation: tenant; read "
        "again when it changes",
    )
    tls_cert_file: str | None = Field(
        None,
        description="PEM of the certificate chain that clients see, read again when it changes; none: plain HTTP. "
        "--metrics-port and --admin-port are plain HTTP either way",
    )
    tls_key_file: str | None = Field(None, description="PEM of the key of --tls-cert-file, without a password")
    usage_log: str | None = Field(
        None, description="folder with a line of JSON for each served request, in a file a day, for billing"
    )
    cache_headers: bool = Field(
        True, description="tell clients in headers which pod served them and what it had cached; off for strangers"
    )
    pass_through: bool = Field(
        False,
        description="for APIs of your engines that the gateway does not know: pass other POST requests below /v1/ on, "
        "except the loading of adapters",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        check_both(self, "tls_cert_file", "tls_key_file")
        return self

    @property
    def has_client_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys_file or self.tenants_file)
