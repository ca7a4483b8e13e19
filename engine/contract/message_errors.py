"""Errors in the shape that clients of `/v1/messages` expect.

https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from engine.contract.errors import ApiError

PATHS = frozenset(("/v1/messages", "/v1/messages/count_tokens"))
"""Paths whose errors have this shape."""

_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def error_body(error: ApiError, status: int | None = None, request_id: str | None = None) -> bytes:
    """Return `{"type": "error", "error": {"type", "message"}}`, with the request's id if there is one.

    `status`: the HTTP status, if it is not the error's own. `details` has the `code` of OpenAI's shape, for programs.
    """
    status = error.status if status is None else status
    kind = _TYPES.get(HTTPStatus(status), "invalid_request_error" if 400 <= status < 500 else "api_error")
    said: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        said["details"] = {"error_code": error.code}
    whole = {"type": "error", "error": said}
    return orjson.dumps(whole if request_id is None else {**whole, "request_id": request_id})
