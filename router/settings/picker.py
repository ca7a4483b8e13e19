"""Settings of the endpoint picker: the gateway's decisions for another proxy."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from engine.common.settings import Settings, flag_of, group


@group("Endpoint picker", common=("ext_proc_port",))
class PickerSettings(Settings):
    """Envoy's external processing."""

    ext_proc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port, at --host, of the endpoint picker: gRPC for Envoy and gateways of the Gateway API Inference "
        "Extension, which send requests themselves; 0: any free one",
    )
    ext_proc_fallbacks: int = Field(
        0,
        ge=0,
        le=8,
        description="further endpoints that an Envoy cluster with the policy override_host tries, in order; one of "
        "type ORIGINAL_DST takes none",
    )
    ext_proc_cert_path: str | None = Field(
        None,
        description="folder with tls.crt and tls.key, as a Secret is mounted, for --ext-proc-port in place of "
        "--tls-cert-file; read again for each connection",
    )

    @model_validator(mode="after")
    def _check_ext_proc(self) -> Self:
        if self.ext_proc_port is None:
            given = sorted(name for name in self.model_fields_set if name.startswith("ext_proc_"))
            given = [name for name in given if name != "ext_proc_port"]
            if given:
                raise ValueError(f"{flag_of(given[0])} needs --ext-proc-port")
            if getattr(self, "inference_objectives", False):
                raise ValueError("--inference-objectives needs --ext-proc-port: only the picker uses them")
            return self
        for url in getattr(self, "engines", ()):
            host = urlsplit(url).hostname or ""
            try:
                ip_address(host)
            except ValueError:
                raise ValueError(
                    f"--engines has {url}: with --ext-proc-port its host must be an IP address, not {host!r}, because "
                    "proxies get addresses"
                ) from None
        return self
