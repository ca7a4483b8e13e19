"""The two requests that discovery makes of the API server, LIST and WATCH of pods, each with a deadline of our own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
from pydantic import ValidationError

from router.fleet.kubernetes_pods import WATCH_EVENT, Bookmark, Pod, PodChange, PodList, Status, WatchError

CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 30.0
"""All pages of a LIST together."""
WATCH_GRACE_S = 10.0
"""A watch whose end, asked for with timeoutSeconds, is so late has a silent server, or none."""
PAGE_PODS = 500
MAX_EVENT_BYTES = 8 * 2**20
"""Several times what the API server stores of an object."""
SHOWN_BYTES = 200


class Trouble(StrEnum):
    """Why pods cannot be followed at the moment."""

    LOGIN = "login"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    EXPIRED = "expired"
    """410: the version to go on from is no longer known."""
    REFUSED = "refused"
    """Any other status."""
    MALFORMED = "malformed"
    SHORT = "short"
    """Watches end as soon as they began."""


class ApiError(Exception):
    """The API server did not answer, or not as it should."""

    def __init__(self, trouble: Trouble, message: str) -> None:
        super().__init__(message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class Cluster:
    """An API server, and how to be let in."""

    url: str
    namespace: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    """Name its certificate is for, where that is not the URL's host."""


class PodApi:
    """Pods with the labels `selector` in the cluster's namespace. A method raises nothing but ApiError."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster, selector: str) -> None:
        self._session = session
        self._cluster = cluster
        self._selector = selector
        self._url = f"{cluster.url.rstrip('/')}/api/v1/namespaces/{cluster.namespace}/pods"

    async def list(self) -> tuple[list[Pod], str]:
        """Every pod, and the version to watch from. Neither is taken from a cache of the server's."""
        pods: list[Pod] = []
        page: dict[str, str] = {}
        deadline = asyncio.get_running_loop().time() + LIST_TIMEOUT_S
        while True:
            response = await self._get({"limit": str(PAGE_PODS), **page}, deadline)
            async with response:
                body = b"".join([chunk async for chunk in _chunks(response, deadline)])
            try:
                answer = PodList.model_validate_json(body)
            except ValidationError:
                raise _malformed("LIST", body) from None
            pods += answer.items
            if not answer.metadata.more:
                return pods, answer.metadata.resource_version
            page = {"continue": answer.metadata.more}

    async def watch(self, version: str, duration_s: int) -> AsyncGenerator[PodChange | Bookmark, None]:
        """What happened since `version`, for `duration_s` seconds. Ends when the server ends it.

        An event that is cut off is left out: it comes again with a watch from the last whole one's version.
        """
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(duration_s),
            "allowWatchBookmarks": "true",
        }
        deadline = asyncio.get_running_loop().time() + duration_s + WATCH_GRACE_S
        response = await self._get(query, deadline)
        async with response:
            rest = b""
            async for chunk in _chunks(response, deadline):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise _malformed("WATCH", rest)
                for line in lines:
                    yield _event(line)

    async def _get(self, query: Mapping[str, str], deadline: float) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._session.get(
                    self._url,
                    params={"labelSelector": self._selector, **query},
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
        async with response:
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
            return ApiError(
                Trouble.FORBIDDEN,
                f"the API server forbids it (403): {said}. Needed in namespace {self._cluster.namespace}: a Role with "
                'apiGroups [""], resources ["pods"], verbs ["list", "watch"], bound to the gateway\'s service account',
            )
        trouble = Trouble.EXPIRED if status == 410 else Trouble.REFUSED
        return ApiError(trouble, f"the API server answered {status}: {said}")


async def _chunks(response: aiohttp.ClientResponse, deadline: float) -> AsyncIterator[bytes]:
    """The body as it comes. The deadline guards each read and not the reader's caller, who would be cancelled by it."""
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


def _event(line: bytes) -> PodChange | Bookmark:
    try:
        event = WATCH_EVENT.validate_json(line)
    except ValidationError:
        raise _malformed("WATCH", line) from None
    if isinstance(event, WatchError):
        trouble = Trouble.EXPIRED if event.object.code == 410 else Trouble.REFUSED
        raise ApiError(trouble, f"the watch was ended ({event.object.code}): {event.object.message}")
    return event


def _malformed(request: str, body: bytes) -> ApiError:
    return ApiError(Trouble.MALFORMED, f"{request} of pods was answered with something else: {_shown(body)}")


def _shown(body: bytes) -> str:
    return repr(body[:SHOWN_BYTES].decode(errors="replace"))


def _text(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(
        error, aiohttp.ClientConnectorCertificateError
    ):
        error = error.os_error  # aiohttp's own words have the address of a TLS context in them
    return f"{type(error).__name__}: {error}"
