"""The names of the endpoints' operations in OpenTelemetry's conventions for generative AI."""

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
"""Operation of endpoints without a name in the conventions. Paths are not used, because they may be any number."""


def operation_of(path: str) -> str:
    """Return `gen_ai.operation.name` for requests to that path."""
    return _OPERATIONS.get(path, OTHER)
