"""Configuration files, such as mounted Secrets and ConfigMaps, that a program reads again while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

REREAD_S = 5.0
"""Seconds between two reads. A Secret takes up to a minute to reach its volume; this adds little."""
MAX_BYTES = 2**20
"""Most bytes that a Secret or a ConfigMap can hold."""


class UnusableFile(Exception):
    """A file that cannot be used; the text names the file and the remedy, and none of its secrets."""


class FollowedFile(Generic[T]):
    """Calls `use` with each new content of a file. `parse` and `use` may raise UnusableFile."""

    def __init__(self, what: str, path: Path, parse: Callable[[Path, bytes], T], use: Callable[[T], None]) -> None:
        """`what`: the file's name in log lines. `parse` gets the path, for its errors, and the content, on a thread."""
        self._what = what
        self._path = path
        self._parse = parse
        self._use = use
        self._content: bytes | None = None
        self._said: T | None = None
        self._error = ""

    async def load(self) -> None:
        """Read the file, and call `use` if its value has changed. Raises UnusableFile."""
        content = await asyncio.to_thread(_read, self._path)
        if content == self._content:
            return
        said = await asyncio.to_thread(self._parse, self._path, content)
        if said != self._said:
            self._use(said)
            self._said = said
            log.info("%s: %s was read", self._what, self._path)
        self._content = content

    async def follow(self) -> None:
        """Read the file every REREAD_S until cancelled. While it is unusable, its last value holds."""
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                await self.load()
                self._error = ""
            except UnusableFile as error:
                if str(error) != self._error:
                    log.error("%s: %s; the last usable content stays in force", self._what, error)
                self._error = str(error)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnusableFile(f"{path} cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise UnusableFile(f"{path} has more than {MAX_BYTES} bytes")
    return content
