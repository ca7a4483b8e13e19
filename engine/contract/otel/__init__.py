"""OpenTelemetry for gateway and engine: traces and metrics by OTLP, as the standard `OTEL_*` variables ask for.

Without them nothing here imports the SDK. `sdk.py` and `metrics_sdk.py` are the only modules that do.
"""
