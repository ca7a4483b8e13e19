"""What the gateway says of itself: Prometheus metrics and log lines."""
