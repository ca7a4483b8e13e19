"""Read a request whose body is a form with a file until a pod can be chosen; the rest is sent on as it comes."""

from __future__ import annotations

from aiohttp import web

from router.edge.admission import Admitted
from router.edge.body import BodyLimits, go_ahead
from router.edge.connection_limits import leave_gate
from router.edge.errors import UnsupportedEncoding
from router.edge.form import Form, too_large
from router.forwarding.exchange import Exchange
from router.reading.inbound import Inbound, Reader
from router.reading.upload import Upload


class Uploads:
    """Reads such requests."""

    def __init__(self, reader: Reader, limits: BodyLimits, max_held_bytes: int, max_bytes: int) -> None:
        """`max_held_bytes`: most bytes that may come before the model is known. `max_bytes`: largest form."""
        self._reader = reader
        self._limits = limits
        self._max_held_bytes = max_held_bytes
        self._max_bytes = max_bytes

    async def read(self, request: web.Request, exchange: Exchange, admitted: Admitted) -> Inbound:
        """Return the request, whose body still comes while it is sent on. Raises ApiError."""
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise UnsupportedEncoding(
                "Content-Encoding must be identity here: send the form as it is", param="Content-Encoding"
            )
        if (request.content_length or 0) > self._max_bytes:
            raise too_large(self._max_bytes)
        form = Form(request, self._limits, exchange.deadline_s, self._max_bytes)
        upload = exchange.upload = Upload(form, admitted)
        leave_gate(request)
        await go_ahead(request)
        tenant = exchange.tenant
        await upload.hold(self._max_held_bytes, self._reader.only_model(tenant))
        size = request.content_length or upload.held
        return self._reader.read_upload(request.path, upload, size, request.headers, tenant)
