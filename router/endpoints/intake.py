"""Read a request: its body within bounds, its named cache, and the pod that has its conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aiohttp import web

from engine.contract.requests import Endpoint
from router.edge.admission import Admitted
from router.edge.body import BodyLimits, go_ahead, read_body
from router.edge.connection_limits import leave_fifo, leaving_fifo, want_body
from router.edge.errors import UnsupportedEncoding
from router.edge.form import Form, too_large
from router.forwarding.conversations import Conversations
from router.forwarding.exchange import Arrival
from router.reading.by_load import BY_LOAD, UPLOADS
from router.reading.inbound import Inbound
from router.reading.jobs import ReadByLoad, ReadRequest
from router.reading.named_cache import NamesCache
from router.reading.names import Models
from router.reading.reader_process import BodyReader
from router.reading.upload import Upload
from router.stored.named_caches import NamedCaches
from router.tenants.tenant import Tenant

KEYED = {str(endpoint): endpoint for endpoint in Endpoint}
"""Endpoints by path whose requests have prefixes. Requests to other paths are routed by load."""


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """The most bytes of a form that may come before the model is known (`max_held_bytes`), and of a whole form."""

    max_held_bytes: int
    max_bytes: int


class Reading:
    """Reads requests, with the parts of a conversation that are kept elsewhere."""

    def __init__(
        self,
        reader: BodyReader,
        models: Models,
        named_caches: NamedCaches,
        conversations: Conversations,
        bodies: BodyLimits,
        uploads: UploadLimits,
    ) -> None:
        self._reader = reader
        self._models = models
        self._named_caches = named_caches
        self._conversations = conversations
        self._bodies = bodies
        self._uploads = uploads

    async def request(self, request: web.Request, arrival: Arrival, admitted: Admitted) -> Inbound:
        """Return a client's request, whose body is read here. Raises ApiError."""
        if request.path in UPLOADS:
            return await self._upload(request, arrival, admitted)
        body = await read_body(request, admitted, self._bodies, arrival.deadline_s)
        raw_path, on_wait = request.rel_url.raw_path, leaving_fifo(request)
        return await self.read(request.path, raw_path, request.headers, body, arrival, admitted, on_wait)

    async def _upload(self, request: web.Request, arrival: Arrival, admitted: Admitted) -> Inbound:
        """Return a request whose body is a form with a file. It is read until a pod can be chosen; the rest is sent on
        as it comes. Raises ApiError."""
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise UnsupportedEncoding(
                "Content-Encoding must be identity here: send the form as it is", param="Content-Encoding"
            )
        if (request.content_length or 0) > self._uploads.max_bytes:
            raise too_large(self._uploads.max_bytes)
        form = Form(request, self._bodies, arrival.deadline_s, self._uploads.max_bytes)
        upload = Upload(form, admitted)
        leave_fifo(request)
        want_body(request)
        try:
            await go_ahead(request)
            tenant = arrival.tenant
            await upload.hold(self._uploads.max_held_bytes, self._models.only_model(tenant))
            size = request.content_length or upload.held
            return self._reader.here.read_upload(request.path, upload, size, request.headers, tenant)
        except BaseException:
            upload.close()
            raise

    async def read(
        self,
        path: str,
        raw_path: str,
        incoming: Mapping[str, str],
        body: bytes,
        arrival: Arrival,
        admitted: Admitted,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Inbound:
        """Return the request to `path`, sent as `raw_path`. `on_wait` is called before a wait. Raises ApiError."""
        tenant, priority = arrival.tenant, arrival.urgency.priority
        endpoint = KEYED.get(path)
        if endpoint is None:
            by_load = ReadByLoad(path if path in BY_LOAD else raw_path, incoming, tenant, priority)
            return await self._reader.read(by_load, body, on_wait)
        asked = ReadRequest(endpoint, incoming, tenant, priority=priority)
        inbound, asked = await self._read(asked, body, admitted, on_wait)
        if inbound.continues is None:
            return inbound
        on_wait()
        return await self._placed(asked, inbound, body)

    async def explained(self, body: bytes, incoming: Mapping[str, str], tenant: Tenant, admitted: Admitted) -> Inbound:
        """Return the request of `tenant` in `body`, which is not sent. The body's fields tell the endpoint.

        Raises ApiError.
        """
        inbound, _ = await self._read(ReadRequest(None, incoming, tenant), body, admitted, lambda: None)
        return inbound

    async def _read(
        self, asked: ReadRequest, body: bytes, admitted: Admitted, on_wait: Callable[[], None]
    ) -> tuple[Inbound, ReadRequest]:
        """Return the request, and how it was read: with the cache that it names. Raises ApiError."""
        try:
            return await self._reader.read(asked, body, on_wait), asked
        except NamesCache as named:
            on_wait()
            cache = await self._named_caches.find(named.name, body, asked.tenant, admitted)
        asked = replace(asked, cache=cache)
        return await self._reader.read(asked, body, on_wait, more=cache.contents), asked

    async def _placed(self, asked: ReadRequest, inbound: Inbound, body: bytes) -> Inbound:
        """Return the request, bound to the pod that has its conversation. Raises ApiError.

        If the request gives one of the operator's names, the name stands for the model that the conversation used
        before. The first user message, by which a model is chosen, is not in the request.
        """
        place = await self._conversations.place(inbound, asked.tenant.name)
        if place is None:
            return inbound
        if inbound.is_named and place.model != inbound.model:
            inbound = await self._reader.read(replace(asked, meant=place.model), body)
        return self._conversations.bound(inbound, place)
