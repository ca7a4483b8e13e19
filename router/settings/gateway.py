"""Settings of the gateway: every flag of `warmroute-gateway`, with unit and default."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator
from pydantic_settings import SettingsConfigDict

from router.settings.clients import ClientSettings
from router.settings.discovery import DiscoverySettings
from router.settings.engines import EngineSideSettings
from router.settings.names import NameSettings
from router.settings.operating import OperatingSettings
from router.settings.overload import DeadlineSettings, OverloadSettings
from router.settings.picker import PickerSettings
from router.settings.removed import REMOVED
from router.settings.routing import RedisSettings, RoutingSettings


class GatewaySettings(
    OperatingSettings,
    RedisSettings,
    PickerSettings,
    DeadlineSettings,
    OverloadSettings,
    RoutingSettings,
    NameSettings,
    ClientSettings,
    EngineSideSettings,
    DiscoverySettings,
):
    """Routes OpenAI-compatible requests to engines by what their caches hold.

    Other commands: `warmroute-gateway keys make NAME` prints a new API key for a tenant, and `warmroute-gateway top`
    shows a running gateway. The standard OTEL_* variables turn on traces (engine/common/otel/README.md).

    Exit status: 0 after a clean stop, 1 if a port is not available or a background task has died, 2 for bad flags or
    key files.
    """

    model_config = SettingsConfigDict(allow_inf_nan=False)
    removed = REMOVED

    @model_validator(mode="after")
    def _check_hedges(self) -> Self:
        if self.hedge_after_s >= self.first_byte_timeout_s:
            raise ValueError(
                "--hedge-after-s must be less than --first-byte-timeout-s, when the first engine is given up"
            )
        return self

    @model_validator(mode="after")
    def _check_engine_tls(self) -> Self:
        plain = [url for url in self.engines if url.startswith("http:")]
        if self.has_engine_tls and plain:
            raise ValueError(f"--engines has {plain[0]}, which is not https, but the engine_tls settings need https")
        return self
