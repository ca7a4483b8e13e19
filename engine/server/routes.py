"""All routes of an engine, and the shape of its errors."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.cache.survey import MOST_PREFIXES
from engine.common.audit import Action, recorded
from engine.common.site_guard import why_not
from engine.contract import headers
from engine.contract.errors import ApiError, BadRequest
from engine.contract.events import Tier
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.message_errors import error_body
from engine.contract.messages import CACHE_CONTROL
from engine.contract.requests import ANSWER_SO_FAR, Endpoint, parse_body
from engine.loop.metrics import EngineMetrics
from engine.server.fields import check_number
from engine.server.generate import generate
from engine.server.http.keys import ApiKeys, Unauthorized, require_key
from engine.server.http.wire import MAX_BODY_BYTES, body_of, finish
from engine.server.message_requests import count_tokens
from engine.server.rendered import render_chat
from engine.server.requests import ModelText, check_ids, check_length, check_model
from engine.server.service import EngineService, ServerState
from engine.text.exact_numbers import exact_fields

log = logging.getLogger(__name__)

STATE = web.AppKey("state", ServerState)
METRICS = web.AppKey("metrics", EngineMetrics)
MAX_PODS_DIGITS = 9


class CrossSite(BadRequest):
    """403: a web page of another site has made the request."""

    status = 403


def make_app(
    state: ServerState,
    metrics: EngineMetrics,
    keys: ApiKeys | None = None,
    *,
    has_metrics: bool = True,
    has_admin: bool = True,
) -> web.Application:
    """Return the app for clients and gateways, with /health. `has_metrics`, `has_admin`: whether it has the routes for
    metrics and those for operators.

    /health and /metrics answer before the model is loaded.
    """
    app = _app(state, metrics, [require_key(keys)] if keys is not None else [])
    app.on_response_prepare.append(_return_request_id)
    app.add_routes(
        [
            web.post(Endpoint.CHAT, _generate),
            web.post(Endpoint.COMPLETIONS, _generate),
            web.post(Endpoint.MESSAGES, _generate),
            web.post(Endpoint.COUNT_TOKENS, _count_tokens),
            web.post(Endpoint.RESPONSES, _generate),
            web.get("/v1/models", _models),
            web.get("/v1/models/{model:.+}", _model),
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
            web.get("/health", _health),
        ]
    )
    if has_metrics:
        app.router.add_get("/metrics", _metrics)
    if has_admin:
        app.add_routes(_ADMIN_ROUTES)
    elif keys is not None:
        app.add_routes(_RESET_ROUTES)  # gateways forward resets here, with the key
    return app


def make_metrics_app(state: ServerState, metrics: EngineMetrics) -> web.Application:
    """Return the app with /metrics alone."""
    app = _app(state, metrics)
    app.router.add_get("/metrics", _metrics)
    return app


def make_admin_app(state: ServerState, metrics: EngineMetrics) -> web.Application:
    """Return the app for operators."""
    app = _app(state, metrics, [_same_site])
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/health", _health)
    app.add_routes(_ADMIN_ROUTES)
    return app


def _app(state: ServerState, metrics: EngineMetrics, guards: Sequence[Middleware] = ()) -> web.Application:
    app = web.Application(middlewares=[_errors, *guards], client_max_size=MAX_BODY_BYTES)
    app[STATE] = state
    app[METRICS] = metrics
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in the API's shape. This is the outermost middleware."""
    try:
        response = await handler(request)
    except ApiError as error:
        response = _error_response(request, error, error.status)
    except web.HTTPException as error:
        response = _error_response(
            request, BadRequest(f"{request.method} {request.path}: {error.reason}"), error.status
        )
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except ConnectionError:
        # The client has left. If this were raised, aiohttp would log an error with a traceback.
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        response = _error_response(request, ApiError("internal error; the engine's log has the details"), 500)
    if request.content.exception() is not None:  # the connection is unreadable, but aiohttp would go on reading
        response.force_close()
        request.content.feed_eof()
    resource = request.match_info.route.resource
    request.app[METRICS].observe_response(resource.canonical if resource else "unknown", response.status)
    await finish(request, response)
    return response


@web.middleware
async def _same_site(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a web page of another site asks for. Prometheus and kubelets may know this host by any name."""
    names = (socket.gethostname().lower(),)
    is_open = request.path in ("/metrics", "/health")
    if not is_open and (why := why_not(request.method, request.headers, names)) is not None:
        raise CrossSite(why, code="cross_site")
    return await handler(request)


async def _return_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if request_id := _request_id(request):
        response.headers[headers.REQUEST_ID] = request_id
        if request.path in MESSAGE_PATHS:
            response.headers[headers.MESSAGE_REQUEST_ID] = request_id


def _request_id(request: web.Request) -> str | None:
    """Return the request's id in printable ASCII: a header may bring bytes that no JSON can hold."""
    given = request.headers.get(headers.REQUEST_ID)
    if given is None or (given.isascii() and given.isprintable()):
        return given
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in given)


def _error_response(request: web.Request, error: ApiError, status: int) -> web.Response:
    body = error.body()
    if request.path in MESSAGE_PATHS:
        body = error_body(error, status, _request_id(request))
    response = web.Response(body=body, status=status, content_type="application/json")
    if status == Unauthorized.status:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return response


async def _generate(request: web.Request) -> web.StreamResponse:
    return await generate(request, request.app[STATE])


async def _models(request: web.Request) -> web.Response:
    service = request.app[STATE].serving()
    pods = request.headers.get(headers.PODS, "")
    if pods.isdecimal() and len(pods) <= MAX_PODS_DIGITS:
        service.on_fleet(int(pods))
    response = _json({"object": "list", "data": [_card(service)]})
    response.headers[headers.POD] = service.pod_id
    response.headers[headers.EPOCH] = str(service.epoch)
    return response


async def _model(request: web.Request) -> web.Response:
    service = request.app[STATE].serving()
    check_model(service.model, request.match_info["model"])
    return _json(_card(service))


def _card(service: EngineService) -> dict[str, Any]:
    """Return the API's description of the model."""
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "warmroute",
        "root": service.model.name,
        "parent": None,
        "max_model_len": service.model.max_model_len,
        "accepts": [ANSWER_SO_FAR, CACHE_CONTROL],
    }


async def _tokenize(request: web.Request) -> web.Response:
    service = request.app[STATE].serving()
    async with body_of(request, request.app[STATE].bodies) as body:
        return _json(await service.workers.run(_tokens_of, service.model, body))


async def _count_tokens(request: web.Request) -> web.Response:
    service = request.app[STATE].serving()
    async with body_of(request, request.app[STATE].bodies) as body:
        count = await service.workers.run(count_tokens, service.model, body)
    return _json({"input_tokens": count})


async def _detokenize(request: web.Request) -> web.Response:
    service = request.app[STATE].serving()
    async with body_of(request, request.app[STATE].bodies) as body:
        return _json(await service.workers.run(_text_of, service.model, body))


async def _health(request: web.Request) -> web.Response:
    status = request.app[STATE].status
    return _json({"status": status}, 200 if status == "ok" else 503)


async def _metrics(request: web.Request) -> web.Response:
    metrics = request.app[METRICS]
    take_stock(request.app[STATE], metrics)
    return web.Response(body=metrics.exposition(), headers={"Content-Type": metrics.content_type})


def take_stock(state: ServerState, metrics: EngineMetrics) -> None:
    """Set the metrics whose values are read at a scrape."""
    service = state.service
    if service is not None:
        stats = service.scheduler.stats()
        metrics.update(
            service.scheduler.load(),
            preemptions=stats.preemptions,
            cached_blocks=service.scheduler.cached_blocks,
            evicted_blocks=stats.evicted_blocks,
            evicted_too_soon=stats.evicted_too_soon,
        )
        asked, learnt = service.scheduler.pins
        metrics.update_pins(len(asked), asked.given_up, len(learnt), learnt.given_up)
        metrics.update_registry(service.registry())
        metrics.update_masks(*service.grammars.times.all())
        metrics.update_tokenizing(service.model.token_cache.bytes, service.model.token_cache.hit_chars)


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    with _audited(request) as action:
        service = request.app[STATE].serving()
        freed = service.loop.reset_cache()
        service.model.token_cache.clear()
        action.detail["freed_blocks"] = freed
        action.status = 200
        return _json({"freed_blocks": freed})


async def _held_keys(request: web.Request) -> web.Response:
    with _audited(request) as action:
        service = request.app[STATE].serving()
        held = service.scheduler.held_keys()
        keys = {tier.name.lower(): [f"{key:016x}" for key in held[tier]] for tier in Tier}
        action.status = 200
        return _json({"epoch": service.epoch, "stride": service.model.stride, "keys": keys})


async def _cache(request: web.Request) -> web.Response:
    with _audited(request) as action:
        service = request.app[STATE].serving()
        most = request.query.get("top", "10")
        if not (most.isascii() and most.isdecimal() and len(most) <= 3 and int(most) <= MOST_PREFIXES):
            raise BadRequest(f"top must be a whole number from 0 to {MOST_PREFIXES}", param="top")
        survey, stats = service.scheduler.survey_cache(), service.scheduler.stats()
        async with service.surveying:
            seen = await service.workers.run(survey.result, int(most))
        counted = ("prompt_tokens_queried", "prompt_tokens_hit", "evicted_blocks", "evicted_too_soon", "steps")
        action.status = 200
        return _json({"epoch": service.epoch, **{name: getattr(stats, name) for name in counted}, **seen})


@contextmanager
def _audited(request: web.Request) -> Iterator[Action]:
    with recorded(request.method, request.path, request.remote) as action:
        try:
            yield action
        except ApiError as error:
            action.status = error.status
            raise
        except Exception:
            action.status = ApiError.status
            raise


_RESET_ROUTES = (web.post("/reset_prefix_cache", _reset_prefix_cache),)
_ADMIN_ROUTES = (*_RESET_ROUTES, web.get("/debug/held_keys", _held_keys), web.get("/debug/cache", _cache))


def _tokens_of(model: ModelText, body: bytes) -> dict[str, Any]:
    """`/tokenize`, in vLLM's shape: a `prompt`, or `messages` and `tools`."""
    fields = _known(body, ("model", "prompt", "messages", "tools", "add_special_tokens", "return_token_strs"), model)
    if ("prompt" in fields) == ("messages" in fields):
        raise BadRequest("give either prompt or messages", param="prompt")
    if "prompt" in fields:
        text = _typed(fields, "prompt", str, "")
    else:
        messages = _typed(fields, "messages", list, [])
        tools = _typed(fields, "tools", list, [])
        check_number(tools, "tools")
        text = render_chat(model, messages, tools).text
    check_length(model, text, "prompt" if "prompt" in fields else "messages")
    special = _typed(fields, "add_special_tokens", bool, "prompt" in fields)
    ids = model.tokenizer.encode(text, add_special_tokens=special).ids
    strings = [model.tokenizer.token_text(i) for i in ids] if _typed(fields, "return_token_strs", bool, False) else None
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings}


def _text_of(model: ModelText, body: bytes) -> dict[str, Any]:
    """`/detokenize`, in vLLM's shape."""
    tokens = _typed(_known(body, ("model", "tokens"), model), "tokens", list, None)
    if not all(type(token) is int for token in tokens):
        raise BadRequest("tokens must be a list of token ids", param="tokens")
    if len(tokens) > model.max_model_len:  # to decode a million takes 0.3 s, in which nothing else runs
        raise BadRequest(
            f"This model's maximum context length is {model.max_model_len} tokens; tokens has {len(tokens)} entries",
            param="tokens",
            code="context_length_exceeded",
        )
    check_ids(tokens, model.vocab_size, "tokens")
    return {"prompt": model.tokenizer.decode(tokens, skip_special_tokens=False)}


def _known(body: bytes, names: tuple[str, ...], model: ModelText) -> dict[str, Any]:
    fields = exact_fields(body, parse_body(body))
    for name in fields:
        if name not in names:
            raise BadRequest(f"{name} is not a field of this endpoint; allowed: {', '.join(names)}", param=name)
    check_model(model, _typed(fields, "model", str, model.name))
    return fields


def _typed(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, kind):
        raise BadRequest(f"{name} must be a {kind.__name__}", param=name)
    return value


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
