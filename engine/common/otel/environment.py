"""Reads the standard variables (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).

This module reads only the variables that decide whether and where to send. The SDK itself reads the rest (headers,
certificates, compression, timeouts, sizes of batches and queues, limits of spans).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from engine.common.otel.sampling import Sampling, sampling_of
from engine.common.settings import ConfigError, check_url

HTTP = "http/protobuf"
GRPC = "grpc"
METRICS_EVERY_MS = 60_000
"""The standard's default."""
LEAST_METRICS_EVERY_MS = 1_000


@dataclass(frozen=True, slots=True)
class OtelSettings:
    """`traces` and `metrics`: the protocol by which they are sent; None: they are not sent."""

    traces: str | None = None
    metrics: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    metrics_every_s: float = METRICS_EVERY_MS / 1000
    service_name: str | None = None
    """None: the program's name."""


def from_environment(environ: Mapping[str, str]) -> OtelSettings:
    """Return the settings in `environ`. Raises ConfigError.

    Traces are sent if `OTEL_TRACES_EXPORTER` is `otlp`, or if it is not set and an endpoint for traces is. Metrics are
    sent if `OTEL_METRICS_EXPORTER` is `otlp`: an endpoint alone does not turn them on.
    """
    given = {name: value.strip() for name, value in environ.items() if name.startswith("OTEL_") and value.strip()}
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return OtelSettings()
    has_endpoint = any(f"OTEL_EXPORTER_OTLP_{what}ENDPOINT" in given for what in ("", "TRACES_"))
    try:
        return OtelSettings(
            traces=_protocol("TRACES", given, default="otlp" if has_endpoint else "none"),
            metrics=_protocol("METRICS", given, default="none"),
            sampling=sampling_of(
                given.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").lower(),
                given.get("OTEL_TRACES_SAMPLER_ARG", ""),
            ),
            metrics_every_s=_interval_s(given.get("OTEL_METRIC_EXPORT_INTERVAL", str(METRICS_EVERY_MS))),
            service_name=given.get("OTEL_SERVICE_NAME") or _service_name(given.get("OTEL_RESOURCE_ATTRIBUTES", "")),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _protocol(signal: str, given: Mapping[str, str], default: str) -> str | None:
    name = f"OTEL_{signal}_EXPORTER"
    exporter = given.get(name, default).lower()
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise ValueError(f"{name}: {exporter!r} is not known here; allowed: otlp, none")
    variable = next(
        (name for what in (f"{signal}_", "") if (name := f"OTEL_EXPORTER_OTLP_{what}PROTOCOL") in given), None
    )
    protocol = given[variable].lower() if variable else HTTP
    if protocol not in (HTTP, GRPC):
        raise ValueError(f"{variable}: {protocol!r} is not known here; allowed: {HTTP}, {GRPC}")
    for what in (f"{signal}_", ""):
        variable = f"OTEL_EXPORTER_OTLP_{what}ENDPOINT"
        url = given.get(variable)
        if url is not None and (protocol == HTTP or "://" in url):
            try:
                check_url(url, ("http", "https"))
            except ValueError as error:
                raise ValueError(f"{variable}: {error}") from None
    return protocol


def _interval_s(text: str) -> float:
    if not (text.isascii() and text.isdecimal() and int(text[:10]) >= LEAST_METRICS_EVERY_MS and len(text) <= 10):
        raise ValueError(
            f"OTEL_METRIC_EXPORT_INTERVAL: {text!r} is not a whole number of milliseconds of at least "
            f"{LEAST_METRICS_EVERY_MS}"
        )
    return int(text) / 1000


def _service_name(attributes: str) -> str | None:
    for pair in attributes.split(","):
        key, _, value = pair.partition("=")
        if key.strip() == "service.name" and value.strip():
            return unquote(value.strip())
    return None
