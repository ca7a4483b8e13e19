"""Who may ask: API keys in a file, as a mounted Secret has them, read again while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from router.gateway.errors import Unauthorized

log = logging.getLogger(__name__)

REREAD_S = 5.0
"""A Secret takes up to a minute to reach its volume; this adds little."""
OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
"""For kubelets and Prometheus, which have no key; nothing there tells of requests or caches."""
_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry without being taken apart
_BEARER = "bearer "


class KeyFileError(Exception):
    """A file that keys cannot be had from; the text names it and the remedy, and no key."""


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in the file, one a line; blank lines and lines that begin with # are none. Raises KeyFileError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise KeyFileError(f"{path}: line {number} is no key: only visible ASCII characters, without spaces")
        keys.append(key)
    if not keys:
        raise KeyFileError(f"{path} holds no key; write one a line")
    return tuple(keys)


class KeyFile:
    """Keeps `use` supplied with what a file says. `use` may raise KeyFileError for what it cannot use."""

    def __init__(self, path: Path, use: Callable[[Sequence[str]], None]) -> None:
        self._path = path
        self._use = use
        self._keys: tuple[str, ...] = ()
        self._error = ""

    async def load(self) -> None:
        """Read the file, and hand over what it says where that is news. Raises KeyFileError."""
        keys = await asyncio.to_thread(read_keys, self._path)
        if keys != self._keys:
            self._use(keys)
            self._keys = keys
            log.info("keys: %d read from %s", len(keys), self._path)

    async def follow(self) -> None:
        """Read it again and again, until cancelled. While it says nothing usable, what it said last holds."""
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                await self.load()
                self._error = ""
            except KeyFileError as error:
                if str(error) != self._error:
                    log.error("keys: %s; the last ones stay in force", error)
                self._error = str(error)


class ClientKeys:
    """The keys that clients may show."""

    def __init__(self) -> None:
        self._digests: frozenset[bytes] = frozenset()

    def use(self, keys: Sequence[str]) -> None:
        """From now on these, and no others."""
        self._digests = frozenset(sha256(key.encode()).digest() for key in keys)

    def admit(self, authorization: str | None) -> None:
        """Return for `Bearer` and one of the keys. Raises Unauthorized."""
        if authorization is None:
            raise Unauthorized("no API key given: send the header 'Authorization: Bearer KEY'", code="missing_api_key")
        shown = authorization[len(_BEARER) :].strip()
        # Digests are compared, not keys: how long it takes says nothing of how much of a key was right.
        digest = sha256(shown.encode("utf-8", "surrogateescape")).digest()
        if not authorization.lower().startswith(_BEARER) or digest not in self._digests:
            raise Unauthorized("the API key is not valid here", code="invalid_api_key")


def require_key(keys: ClientKeys, on_refusal: Callable[[], None]) -> Middleware:
    """A middleware that lets nothing but OPEN_PATHS pass without a key."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            try:
                keys.admit(request.headers.get("Authorization"))
            except Unauthorized:
                on_refusal()
                raise
        return await handler(request)

    return check
