"""Turn exceptions into responses: every error that a client sees has the format of its API."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from engine.contract import headers
from engine.contract.errors import ApiError, BadRequest, Unavailable, escaped, quoted
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.message_errors import error_body as message_error_body

log = logging.getLogger(__name__)

OPERATORS_PATHS = frozenset(("/metrics", "/v1/pods", "/v1/route/explain", "/reset_prefix_cache", "/ui"))
"""Paths that --admin-port serves and --port does not."""
RETRY_AFTER_S = 1.0
SCALING_RETRY_AFTER_S = 5.0
"""Retry-After for a model without an engine: an engine takes a while to start."""


class TooLarge(BadRequest):
    """413: the body is over the bound."""

    status = 413


class RequestTimeout(BadRequest):
    """408: the client was too slow."""

    status = 408


class UnsupportedEncoding(BadRequest):
    """415: the gateway does not know the body's compression."""

    status = 415


class Forbidden(BadRequest):
    """403: switched off by configuration, as the message says, or not allowed for this tenant."""

    status = 403


class Unauthorized(BadRequest):
    """401: no key, or no valid key."""

    status = 401


class NoEngine(Unavailable):
    """503: the model is known, but no engine serves it at the moment."""

    def __init__(self, model: str, *, retry_after_s: float) -> None:
        super().__init__(f"no engine serving {quoted(model)} is up", code="no_engine", retry_after_s=retry_after_s)
        self.model = model


class OutOfResources(Unavailable):
    """503: no connection to any engine can be made, because this machine lacks a resource."""

    def __init__(self, lack: str) -> None:
        message = f"the gateway cannot open a connection to an engine ({lack}): try again"
        super().__init__(message, code="overloaded", retry_after_s=1.0)
        self.lack = lack


class UpstreamError(ApiError):
    """No pod gave a whole answer. `detail` is for logs only: clients must not learn the addresses of engines."""

    def __init__(self, message: str, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail or self.message


class BadGateway(UpstreamError):
    """502: no pod gave a whole answer."""

    status = 502
    type = "upstream_error"


class EngineLeaves(UpstreamError):
    """503: the engine shuts down or sleeps, and no other engine took the request."""

    status = 503
    type = "service_unavailable_error"

    def __init__(self, detail: str, *, asleep: bool = False) -> None:
        what = "sleeps" if asleep else "shuts down"
        super().__init__(f"the engine {what}, and no other engine is up: try again", detail)
        self.retry_after_s = 1.0


class DeadlineExceeded(UpstreamError):
    """504: no pod answered in time."""

    status = 504
    type = "timeout_error"


def error_response(
    error: ApiError,
    request_id: str | None = None,
    status: int | None = None,
    rate_headers: Mapping[str, str] | None = None,
    path: str = "",
) -> web.Response:
    """Return `error` as a response, with the request's id, Retry-After and `rate_headers` if given.

    It has the format that clients of `path` expect, OpenAI's for most paths.
    """
    is_message = path in MESSAGE_PATHS
    body = message_error_body(error, status, request_id) if is_message else error.body()
    response = web.Response(status=status or error.status, body=body, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == Unauthorized.status:
        response.headers["WWW-Authenticate"] = "Bearer"
    if request_id is not None:
        response.headers[headers.REQUEST_ID] = request_id
        if is_message:
            response.headers[headers.MESSAGE_REQUEST_ID] = request_id
    if rate_headers:
        response.headers.update(rate_headers)
    return response


def http_log() -> logging.Logger:
    """Return aiohttp's logger for errors around requests: one line for a client's fault, a traceback for a defect."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_not_a_clients_fault)
    return logger


def _is_not_a_clients_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.info("%s: %s", record.getMessage(), fault_of(error))
    return False


def fault_of(error: HttpProcessingError) -> str:
    """Return what aiohttp says is wrong with a request, without the quoted parts, which may contain a key."""
    return error.message.partition(":")[0]


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn a handler's exceptions into error responses. No exception gets here once a response has begun."""
    try:
        response = await handler(request)
    except Exception as error:  # outermost: answer the request, and log the traceback
        response = _answer_to(request, error)
    if request.content.exception() is not None:  # the connection cannot be read any further, though aiohttp would try
        response.force_close()
        request.content.feed_eof()
    return response


def counting_unknown_paths(count: Callable[[], None]) -> Middleware:
    """Return a middleware that calls `count` for each request that no handler takes."""

    @web.middleware
    async def counted(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            count()
            raise

    return counted


async def end_unread(request: web.Request, response: web.StreamResponse) -> None:
    """If an answer goes out before the body has come, end the connection, and say so in the answer's head.

    The rest of the body is not worth reading only to use the connection again. Without a word in the head, the client
    would send its next request on this connection. The function is for `on_response_prepare`, so it also covers answers
    that a handler begins to send itself.
    """
    if not request.content.is_eof():
        end_connection(response)


def end_connection(response: web.StreamResponse) -> None:
    """End the connection with this answer. Call this when the answer is prepared, and its headers are made."""
    response.force_close()
    response.headers["Connection"] = "close"


def _answer_to(request: web.Request, error: Exception) -> web.StreamResponse:
    """Return the response to `error`. Raises it again if it is a redirect."""
    if isinstance(error, ApiError):
        return error_response(error, path=request.path)
    if isinstance(error, web.HTTPException):
        if error.status < 400:
            raise error
        kind = TooLarge if error.status == TooLarge.status else BadRequest
        message = f"{request.method} {escaped(request.path)}: {error.text}"
        if error.status == web.HTTPNotFound.status_code:
            served = {resource.canonical for resource in request.app.router.resources()}
            message += f"; served here: {', '.join(sorted(served))}"
            if request.path in OPERATORS_PATHS:
                message += "; operators have a port of their own: --admin-port"
        response = error_response(kind(message), status=error.status, path=request.path)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    log.error("%s %s", request.method, escaped(request.path), exc_info=error)
    return error_response(ApiError("internal error of the gateway"), path=request.path)
