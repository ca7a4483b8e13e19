"""Every error a client sees has the shape of its API; this is where exceptions become responses."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.contract import headers
from engine.contract.errors import ApiError, BadRequest, Unavailable, escaped, quoted
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.message_errors import error_body as message_error_body

log = logging.getLogger(__name__)

OPERATORS_PATHS = frozenset(("/metrics", "/v1/pods", "/v1/route/explain", "/reset_prefix_cache", "/ui"))
"""What --admin-port serves and --port does not."""


class TooLarge(BadRequest):
    """413: the body is over the bound."""

    status = 413


class RequestTimeout(BadRequest):
    """408: the client was too slow."""

    status = 408


class UnsupportedEncoding(BadRequest):
    """415: the body is compressed in a way that is not known here."""

    status = 415


class Forbidden(BadRequest):
    """403: switched off by configuration, as the message says, or not for this tenant."""

    status = 403


class Unauthorized(BadRequest):
    """401: no key, or none that is valid."""

    status = 401


class NoEngine(Unavailable):
    """503: the model is known, and no engine serves it at the moment."""

    def __init__(self, model: str, *, retry_after_s: float) -> None:
        super().__init__(f"no engine serving {quoted(model)} is up", code="no_engine", retry_after_s=retry_after_s)
        self.model = model


class Lacking(Unavailable):
    """503: no connection to any engine can be made, for want of something of this machine."""

    def __init__(self, lack: str) -> None:
        super().__init__(
            f"the gateway lacks what a connection needs ({lack}): try again", code="overloaded", retry_after_s=1.0
        )
        self.lack = lack


class UpstreamError(ApiError):
    """No pod gave a whole answer. `detail` is for logs: clients are not told where engines are."""

    def __init__(self, message: str, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail or self.message


class BadGateway(UpstreamError):
    """502: no pod gave a whole answer."""

    status = 502
    type = "upstream_error"


class EngineLeaves(UpstreamError):
    """503: the engine shuts down or sleeps, and no other took the request."""

    status = 503
    type = "service_unavailable_error"

    def __init__(self, detail: str, *, asleep: bool = False) -> None:
        what = "sleeps" if asleep else "shuts down"
        super().__init__(f"the engine {what}, and no other one is up: try again", detail)
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
    """`error` as a response, with the request's id, Retry-After and `rate_headers` where there are such.

    In the shape that clients of `path` expect, OpenAI's for most.
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
    """Where aiohttp logs what goes wrong around requests: a client's fault in a line, a defect with its traceback."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_no_fault_of_a_client)
    return logger


def _is_no_fault_of_a_client(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.info("%s: %s", record.getMessage(), fault_of(error))
    return False


def fault_of(error: HttpProcessingError) -> str:
    """What aiohttp says is wrong with a request, without what it quotes of it: a key may stand there."""
    return error.message.partition(":")[0]


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Exceptions of a handler as error responses. A response that has begun never gets here with an exception."""
    try:
        response = await handler(request)
    except Exception as error:  # outermost: the request gets an answer, the log the traceback
        response = _answer_to(request, error)
    if request.content.exception() is not None:  # nothing more can be read on this connection, though aiohttp would try
        response.force_close()
        request.content.feed_eof()
    elif not request.content.is_eof():  # answered without its body: that is not read on for another request's sake
        response.force_close()
    return response


def _answer_to(request: web.Request, error: Exception) -> web.StreamResponse:
    """Raises `error` where it is a redirect."""
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
