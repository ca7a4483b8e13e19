"""Settings of operators: metrics, administration, logs, the end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from engine.common.log_lines import Format
from engine.common.settings import Settings, check_port_address, group, port_address


@group("Operating", common=("config", "metrics_port", "admin_port", "log_requests", "drain_timeout_s"))
class OperatingSettings(Settings):
    """What operators see, and how a gateway ends."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="separate port of /metrics, at --host, for Prometheus; 0: any free one"
    )
    admin_port: str | None = Field(
        None,
        coerce_numbers_to_str=True,
        description="port for operators, PORT on loopback or HOST:PORT; it has the live page /ui, /v1/pods, "
        "/v1/route/explain, /reset_prefix_cache and /metrics: whoever reaches it may read and empty caches",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe lines that are written"
    )
    log_format: Format = Field("text", description="form of log lines on stderr, for a collector of logs: json")
    log_requests: bool = Field(False, description="log one JSON line per finished request to stderr")
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="after SIGTERM, while /ready answers 503: new requests are still taken for so long, until load "
        "balancers have noticed",
    )
    drain_timeout_s: float = Field(
        60.0, ge=0, description="after SIGTERM: started answers may take so long; below the supervisor's grace period"
    )

    @field_validator("admin_port")
    @classmethod
    def _check_admin_port(cls, address: str | None) -> str | None:
        return None if address is None else check_port_address(address)

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port for operators."""
        return None if self.admin_port is None else port_address(self.admin_port)
