"""Errors in the shape of the OpenAI API, shared by every HTTP surface."""

from __future__ import annotations

from typing import Any

import orjson

MAX_MESSAGE_CHARS = 2000
MAX_NAME_CHARS = 200


def quoted(name: str) -> str:
    """Return a name from a client, safe for messages and logs: in quotes, cut, and with control characters escaped."""
    return repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "...")


def escaped(name: str) -> str:
    """Return the same as `quoted`, without the quotes."""
    return quoted(name)[1:-1]


class ApiError(Exception):
    """An error for the client, as `{"error": {"message", "type", "param", "code"}}`.

    A message is cut to MAX_MESSAGE_CHARS. `param` names the request field at fault and is cut to MAX_NAME_CHARS;
    `retry_after_s` (seconds) becomes a `Retry-After` header.
    Shape: https://platform.openai.com/docs/guides/error-codes
    """

    status = 500
    type = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "..."
        if param is not None and len(param) > MAX_NAME_CHARS:  # a field may have any name that a client sends
            param = param[:MAX_NAME_CHARS] + "..."
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, since subclasses take other arguments."""
        return _unpickled, (type(self), self.args), self.__dict__

    def body(self) -> bytes:
        """Return the JSON body of the response."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def _unpickled(kind: type[ApiError], args: tuple[Any, ...]) -> ApiError:
    made = kind.__new__(kind)
    made.args = args
    return made


class BadRequest(ApiError):
    """400: the client must change the request; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ModelNotFound(ApiError):
    """404: no pod serves the model named in the request."""

    status = 404
    type = "invalid_request_error"


class TooManyRequests(ApiError):
    """429: the queue is at its bound; come back after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"


class Unavailable(ApiError):
    """503: nothing can serve this at the moment; come back after `retry_after_s`."""

    status = 503
    type = "service_unavailable_error"
