"""The outcome of requests as numbers."""
