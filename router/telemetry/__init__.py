"""Prometheus metrics and log lines of the gateway."""
