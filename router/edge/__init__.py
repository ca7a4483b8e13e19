"""Clients' connections: TLS, bounds, keys, bodies, headers, and the errors that clients see."""
