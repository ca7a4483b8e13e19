"""Settings of the endpoint picker: the gateway's decisions for another proxy."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from engine.common.settings import Settings, flag_of


class PickerSettings(Settings):
    """Envoy's external processing."""

    ext_proc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port, at --host, of the endpoint picker: gRPC for Envoy and for gateways of the Gateway API "
        "Inference Extension, which ask it where each request goes and send it there themselves; with TLS if "
        "--ext-proc-tls-cert-file or --tls-cert-file is given; 0 takes any free one; none: it is not served",
    )
    ext_proc_fallbacks: int = Field(
        0,
        ge=0,
        le=8,
        description="further endpoints that the proxy is told to try, in order, if it cannot use the first. An "
        "Envoy cluster with the policy override_host takes them; one of type ORIGINAL_DST takes a single endpoint",
    )
    ext_proc_tls_cert_file: str | None = Field(
        None,
        description="PEM file of the certificate chain that proxies see at --ext-proc-port, in place of "
        "--tls-cert-file, read again for each connection; many gateways take a self-signed one",
    )
    ext_proc_tls_key_file: str | None = Field(
        None, description="PEM file of the key of --ext-proc-tls-cert-file, without a password"
    )
    ext_proc_service: str | None = Field(
        None,
        description="Service that leads to --ext-proc-port; an InferencePool whose endpointPickerRef names another "
        "causes a warning; none: no check",
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
            if getattr(self, "inference_objectives", False):
                raise ValueError("--inference-objectives needs --ext-proc-port: only the picker uses them")
            return self
        if (self.ext_proc_tls_cert_file is None) is not (self.ext_proc_tls_key_file is None):
            raise ValueError("--ext-proc-tls-cert-file and --ext-proc-tls-key-file need each other")
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
