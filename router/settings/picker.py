"""Settings of the endpoint picker: the gateway's decisions for another proxy."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from engine.contract.settings import Settings, flag_of


class PickerSettings(Settings):
    """Envoy's external processing."""

    ext_proc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port, at --host, of the endpoint picker: gRPC for Envoy and for gateways of the Gateway API "
        "Inference Extension, which ask it where each request goes and send it there themselves; with TLS where "
        "--tls-cert-file is given; 0 takes any free one; none: it is not served",
    )
    ext_proc_fallbacks: int = Field(
        0,
        ge=0,
        le=8,
        description="further endpoints that the proxy is told to try, in order, where it cannot use the first. An "
        "Envoy cluster with the policy override_host takes them; one of type ORIGINAL_DST takes a single endpoint",
    )
    ext_proc_test_headers: bool = Field(
        False,
        description="follow the header test-epp-endpoint-selection and answer with x-conformance-test-served-endpoint, "
        "for conformance tests of gateways: any client could choose its endpoint",
    )

    @model_validator(mode="after")
    def _check_ext_proc(self) -> Self:
        if self.ext_proc_port is None:
            given = sorted(name for name in self.model_fields_set if name.startswith("ext_proc_"))
            given = [name for name in given if name != "ext_proc_port"]
            if given:
                raise ValueError(f"{flag_of(given[0])} needs --ext-proc-port")
            return self
        for url in getattr(self, "engines", ()):
            host = urlsplit(url).hostname or ""
            try:
                ip_address(host)
            except ValueError:
                raise ValueError(
                    f"--engines has {url}: with --ext-proc-port it must be an IP address, as a proxy is told where "
                    f"{host!r} is by address"
                ) from None
        return self
