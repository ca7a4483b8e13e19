"""OpenTelemetry for gateway and engine: traces and metrics by OTLP, turned on by the standard `OTEL_*` variables.

Without these variables nothing here imports the SDK. Only `sdk.py` and `metrics_sdk.py` import it.
"""
