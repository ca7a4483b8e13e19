"""What OpenTelemetry's conventions for generative AI call the work of an endpoint."""

from __future__ import annotations

PROVIDER = "warmroute"
"""`gen_ai.provider.name` of gateway and engine."""
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
OTHER = "request"
"""Of endpoints that the conventions have no word for: paths are no names, as there may be any number of them."""


def operation_of(path: str) -> str:
    """`gen_ai.operation.name` for requests to that path."""
    return _OPERATIONS.get(path, OTHER)
