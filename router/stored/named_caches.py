"""`/v1/caches`: clients store beginnings of prompts under names, and send requests that name one."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from engine.contract.bounded_json import loads
from engine.contract.errors import ApiError, BadRequest, ModelNotFound, quoted
from engine.contract.requests import parse_body
from router.edge.admission import Admission, Admitted
from router.edge.body import BodyLimits, read_body
from router.edge.client_keys import tenant_of
from router.edge.connection_limits import leave_fifo
from router.edge.errors import error_response
from router.edge.headers import request_id
from router.fleet.fleet import Fleet
from router.reading.jobs import ReadNewCache
from router.reading.named_cache import (
    FIELD,
    MAX_MARKS,
    PREFIX,
    CacheMeta,
    StoredCache,
    id_of,
    is_id,
    new_id,
    parse_renewal,
)
from router.reading.names import Names, check_allowed, find_model
from router.reading.reader_process import BodyReader
from router.stored.cache_store import CacheStore
from router.tenants.tenant import Tenant

PAGE = 50
MAX_PAGE = 1000
_MARK = b'"cache_control"'
KEEPS = "cache_control"
"""An engine that keeps marked contents lists this in its model card's `accepts`."""


@dataclass(frozen=True, slots=True)
class NamedCacheLimits:
    """The longest life of a cache in seconds, and the most bytes of a body with the contents of a cache."""

    max_ttl_s: float
    max_body_bytes: int
    is_enabled: bool


class NoSuchCache(ModelNotFound):
    """404: the tenant has no cache of that name."""

    def __init__(self, cache_id: str, param: str | None) -> None:
        super().__init__(
            f"there is no cache {quoted(PREFIX + cache_id)}: it has expired or was never made; make it again",
            param=param,
            code="cache_not_found",
        )


class NamedCaches:
    """Handles `/v1/caches`, and puts the contents of a cache in front of the request that names it."""

    def __init__(
        self,
        store: CacheStore,
        fleet: Fleet,
        names: Names,
        reader: BodyReader,
        admission: Admission,
        bodies: BodyLimits,
        limits: NamedCacheLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since 1970."""
        self._store = store
        self._fleet = fleet
        self._names = names
        self._reader = reader
        self._admission = admission
        self._bodies = bodies
        self._limits = limits
        self._clock = clock

    async def find(self, name: object, body: bytes, tenant: Tenant, admitted: Admitted) -> StoredCache:
        """Return the named cache that `body` begins with. Raises ApiError."""
        self._check_enabled()
        cache_id = id_of(name)
        found = await self._store.get(tenant.name, cache_id) if is_id(cache_id) else None
        if found is None:
            raise NoSuchCache(cache_id, FIELD)
        meta, contents = found
        admitted.hold(2 * len(body) + len(contents))
        left_s = meta.until_s - self._clock()
        keeps = body.count(_MARK) + contents.count(_MARK) < MAX_MARKS and self._keeps(meta.model)
        return StoredCache(meta, contents, left_s if keeps else None, self._limits.max_body_bytes)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/caches`."""
        return await self._answer(request, self._create)

    async def list(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/caches`: return a page of `pageSize` entries, with the `pageToken` of the next page."""
        return await self._answer(request, self._list)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/caches/{id}`: return all except the contents."""
        return await self._answer(request, self._get)

    async def renew(self, request: web.Request) -> web.StreamResponse:
        """`PATCH /v1/caches/{id}`: change the time until which the cache is kept."""
        return await self._answer(request, self._renew)

    async def remove(self, request: web.Request) -> web.StreamResponse:
        """`DELETE /v1/caches/{id}`."""
        return await self._answer(request, self._remove)

    async def _create(self, request: web.Request, tenant: Tenant) -> dict[str, Any]:
        with self._admission.request() as admitted:
            body, now_s = await self._body(request, admitted), self._clock()
            wanted, size = await self._reader.read(ReadNewCache(now_s, self._limits.max_ttl_s, tenant), body)
            check_allowed(tenant, wanted.model)
            if wanted.model not in self._names and not self._fleet.is_known(wanted.model):
                find_model(self._fleet, wanted.model, tenant)
            tokens = self._reader.tokens(wanted.model, size)
            meta = CacheMeta(
                new_id(), wanted.model, wanted.display_name, now_s, now_s, wanted.until_s, len(wanted.contents), tokens
            )
            await self._store.add(tenant.name, meta, wanted.contents)
            return meta.shown()

    async def _list(self, request: web.Request, tenant: Tenant) -> dict[str, Any]:
        query = request.query
        asked = query.get("pageSize", query.get("page_size", str(PAGE)))
        if not (asked.isascii() and asked.isdigit() and len(asked) <= 6 and 1 <= int(asked) <= MAX_PAGE):
            raise BadRequest(f"pageSize must be from 1 to {MAX_PAGE}; got {quoted(asked)}", param="pageSize")
        after = _place(query.get("pageToken", query.get("page_token", "")))
        metas = [meta for meta in await self._store.all_of(tenant.name) if (meta.created_s, meta.id) > after]
        page = metas[: int(asked)]
        more = {"nextPageToken": _token(page[-1])} if len(metas) > len(page) else {}
        return {"cachedContents": [meta.shown() for meta in page], **more}

    async def _get(self, request: web.Request, tenant: Tenant) -> dict[str, Any]:
        cache_id = request.match_info["id"]
        found = next((meta for meta in await self._store.all_of(tenant.name) if meta.id == cache_id), None)
        if found is None:
            raise NoSuchCache(cache_id, None)
        return found.shown()

    async def _renew(self, request: web.Request, tenant: Tenant) -> dict[str, Any]:
        with self._admission.request() as admitted:
            fields = parse_body(await self._body(request, admitted))
            until_s = parse_renewal(fields, self._clock(), self._limits.max_ttl_s)
        cache_id = request.match_info["id"]
        meta = await self._store.renew(tenant.name, cache_id, until_s) if is_id(cache_id) else None
        if meta is None:
            raise NoSuchCache(cache_id, None)
        return meta.shown()

    async def _remove(self, request: web.Request, tenant: Tenant) -> dict[str, Any]:
        cache_id = request.match_info["id"]
        if not is_id(cache_id) or not await self._store.remove(tenant.name, cache_id):
            raise NoSuchCache(cache_id, None)
        return {}

    async def _body(self, request: web.Request, admitted: Admitted) -> bytes:
        deadline_s = asyncio.get_running_loop().time() + self._bodies.timeout_s
        body = await read_body(request, admitted, self._bodies, deadline_s)
        leave_fifo(request)  # what follows may wait for Redis
        return body

    async def _answer(self, request: web.Request, handler: Callable[[web.Request, Tenant], Any]) -> web.StreamResponse:
        try:
            self._check_enabled()
            if not request.can_read_body:
                leave_fifo(request)
            answer = await handler(request, tenant_of(request))
            return web.Response(body=orjson.dumps(answer), content_type="application/json")
        except ApiError as error:
            return error_response(error, request_id(request.headers), path=request.path)

    def _check_enabled(self) -> None:
        if not self._limits.is_enabled:
            raise BadRequest("named caches are switched off here: --named-caches is 0", code="unsupported_parameter")

    def _keeps(self, model: str) -> bool:
        """Whether the engines of this model keep marked contents, according to one engine's model card."""
        card = self._fleet.models().get(model)
        try:
            accepts = loads(card.card).get("accepts") if card is not None else None
        except (orjson.JSONDecodeError, AttributeError):
            return False
        return isinstance(accepts, list) and KEEPS in accepts


def _token(meta: CacheMeta) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([meta.created_s, meta.id])).decode()


def _place(token: str) -> tuple[float, str]:
    """Return the entry after which a page begins. Raises BadRequest."""
    if not token:
        return (0.0, "")
    try:
        created_s, cache_id = loads(base64.urlsafe_b64decode(token.encode()))
        if isinstance(created_s, float | int) and isinstance(cache_id, str):
            return float(created_s), cache_id
    except (ValueError, TypeError, binascii.Error):
        pass
    raise BadRequest("pageToken must be the nextPageToken of an earlier page", param="pageToken")
