"""The two requests to the API server, LIST and WATCH, each with a deadline of our own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic

import aiohttp
from pydantic import ValidationError

from router.kubernetes.objects import Bookmark, Change, Object, ObjectKind, Status, WatchError

CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 30.0
"""The deadline for all pages of a LIST together."""
WATCH_GRACE_S = 10.0
"""If a watch ends this much later than timeoutSeconds asked for, the server is silent or gone."""
PAGE_OBJECTS = 500
MAX_EVENT_BYTES = 8 * 2**20
"""Several times the size that the API server allows for an object."""
SHOWN_BYTES = 200


class Trouble(StrEnum):
    """Why objects cannot be followed at the moment."""

    LOGIN = "login"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    EXPIRED = "expired"
    """410: the version to continue from is no longer known."""
    ABSENT = "absent"
    """The API server does not know the kind: its definition is not installed."""
    REFUSED = "refused"
    """Any other status."""
    MALFORMED = "malformed"
    SHORT = "short"
    """Watches end soon after they begin."""


class ApiError(Exception):
    """The API server did not answer, or answered with an error or nonsense."""

    def __init__(self, trouble: Trouble, message: str) -> None:
        super().__init__(message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class Cluster:
    """An API server, and the credentials for it."""

    url: str
    namespace: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    """The name in its certificate, if that is not the URL's host."""


class ObjectApi(Generic[Object]):
    """Objects of one kind in the cluster's namespace. Its methods raise only ApiError."""

    def __init__(
        self, session: aiohttp.ClientSession, cluster: Cluster, kind: ObjectKind[Object], selected: Mapping[str, str]
    ) -> None:
        """`selected`: which objects, as the query `labelSelector` or `fieldSelector` says."""
        self._session = session
        self._cluster = cluster
        self._kind = kind
        self._selected = dict(selected)
        self._url = f"{cluster.url.rstrip('/')}{kind.path}/namespaces/{cluster.namespace}/{kind.plural}"

    async def list(self) -> tuple[list[Object], str]:
        """Return every object, and the version to watch from. The server must not answer from its cache."""
        objects: list[Object] = []
        page: dict[str, str] = {}
        deadline = asyncio.get_running_loop().time() + LIST_TIMEOUT_S
        while True:
            response = await self._get({"limit": str(PAGE_OBJECTS), **page}, deadline)
            async with _left(response):
                body = b"".join([chunk async for chunk in _chunks(response, deadline)])
            try:
                answer = self._kind.listing.model_validate_json(body)
            except ValidationError:
                raise self._malformed("LIST", body) from None
            objects += answer.items
            if not answer.metadata.more:
                return objects, answer.metadata.resource_version
            page = {"continue": answer.metadata.more}

    async def watch(self, version: str, duration_s: int) -> AsyncGenerator[Change[Object] | Bookmark, None]:
        """Yield what happened since `version`, for `duration_s` seconds. Ends when the server ends it.

        An event that is cut off is skipped: a watch from the last whole event's version brings it again.
        """
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(duration_s),
            "allowWatchBookmarks": "true",
        }
        deadline = asyncio.get_running_loop().time() + duration_s + WATCH_GRACE_S
        response = await self._get(query, deadline)
        async with _left(response):
            rest = b""
            async for chunk in _chunks(response, deadline):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise self._malformed("WATCH", rest)
                for line in lines:
                    yield self._event(line)

    async def _get(self, query: Mapping[str, str], deadline: float) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._session.get(
                    self._url,
                    params={**self._selected, **query},
                    headers=self._cluster.headers,
                    ssl=self._cluster.tls or True,
                    server_hostname=self._cluster.server_name,
                    allow_redirects=False,  # the token is for this server alone
                )
        except TimeoutError:
            raise ApiError(Trouble.SILENT, f"no answer from {self._cluster.url}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(Trouble.UNREACHABLE, f"{self._cluster.url}: {_text(error)}") from None
        if response.status == 200:
            return response
        async with _left(response):
            body = b"".join([chunk async for chunk in _chunks(response, deadline)])
        raise self._refusal(response.status, body)

    def _refusal(self, status: int, body: bytes) -> ApiError:
        try:
            said = Status.model_validate_json(body).message
        except ValidationError:
            said = _shown(body)
        if status == 401:
            return ApiError(Trouble.UNAUTHORIZED, f"the API server does not accept the credentials (401): {said}")
        if status == 403:
            kind = self._kind
            return ApiError(
                Trouble.FORBIDDEN,
                f"the API server forbids it (403): {said}. Needed in namespace {self._cluster.namespace}: a Role with "
                f'apiGroups ["{kind.group}"], resources ["{kind.plural}"], verbs ["list", "watch"], bound to the '
                "gateway's service account",
            )
        if status == 404 and self._kind.remedy:
            kind = self._kind
            about = f"{kind.plural} of {kind.group}/{kind.version}"
            return ApiError(Trouble.ABSENT, f"the API server knows no {about} (404): {kind.remedy}")
        trouble = Trouble.EXPIRED if status == 410 else Trouble.REFUSED
        return ApiError(trouble, f"the API server answered {status}: {said}")

    def _event(self, line: bytes) -> Change[Object] | Bookmark:
        try:
            event = self._kind.event.validate_json(line)
        except ValidationError:
            raise self._malformed("WATCH", line) from None
        if isinstance(event, WatchError):
            trouble = Trouble.EXPIRED if event.object.code == 410 else Trouble.REFUSED
            raise ApiError(trouble, f"the watch was ended ({event.object.code}): {event.object.message}")
        return event

    def _malformed(self, request: str, body: bytes) -> ApiError:
        about = f"{request} of {self._kind.plural} was answered with something else"
        return ApiError(Trouble.MALFORMED, f"{about}: {_shown(body)}")


@contextlib.asynccontextmanager
async def _left(response: aiohttp.ClientResponse) -> AsyncIterator[None]:
    """Release the response at the end of the block. If its body has not ended by then, abort the connection.

    Closing the connection is not enough: over TLS that waits for an answer from the server. If the server is gone, the
    wait outlives our loop.
    """
    async with response:
        try:
            yield
        finally:
            connection = response.connection
            if connection is not None and connection.transport is not None:
                connection.transport.abort()


async def _chunks(response: aiohttp.ClientResponse, deadline: float) -> AsyncIterator[bytes]:
    """Yield the body as it comes. The deadline guards each read. It is not armed during the caller's own work, because
    it would cancel that work."""
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await response.content.readany()
        except TimeoutError:
            raise ApiError(Trouble.SILENT, f"the API server fell silent ({response.url.host})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(Trouble.UNREACHABLE, f"the API server broke off: {_text(error)}") from None
        if not chunk:
            return
        yield chunk


def _shown(body: bytes) -> str:
    return repr(body[:SHOWN_BYTES].decode(errors="replace"))


def _text(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(
        error, aiohttp.ClientConnectorCertificateError
    ):
        error = error.os_error  # aiohttp's own text has the address of a TLS context in it
    return f"{type(error).__name__}: {error}"
