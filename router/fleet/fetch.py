"""Gets what an engine says outside its API, such as metrics; bounded in time and bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
from yarl import URL

from router.fleet.lack import Lacks, lack_of
from router.fleet.probe import for_name

Fetch = Callable[[str, str, float, int], Awaitable[bytes]]
"""Takes an engine's base URL, a URL, and bounds in seconds and bytes. Returns the body of a 200. Raises Unread."""
OUTCOMES = ("read", "late", "failed", "protected", "none", "odd")


class Unread(Exception):
    """The body could not be read. `outcome`: one of OUTCOMES.

    `late`: not in time; `failed`: another error, which may pass; `protected`: the page needs a key; `none`: there is
    no such page; `odd`: it is too large.
    """

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class HttpFetch:
    """Fetches over HTTP. `credentials` gives the headers that the engine at a base URL needs now."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        credentials: Callable[[str], Mapping[str, str]] = lambda engine: {},
        lacks: Lacks | None = None,
    ) -> None:
        self._session = session
        self._credentials = credentials
        self._lacks = lacks or Lacks()

    async def __call__(self, engine: str, url: str, deadline_s: float, most_bytes: int) -> bytes:
        """See `Fetch`."""
        credentials, path = self._credentials(engine), URL(url, encoded=True).path
        chunks: list[bytes] = []
        size = 0
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.get(
                    URL(url, encoded=True),
                    headers={"Accept": "text/plain", "Accept-Encoding": "identity", **for_name(engine), **credentials},
                    allow_redirects=False,
                ) as response,
            ):
                status = response.status
                if status in (401, 403):
                    why = "refuses the key of" if credentials else "needs a key, which is given with"
                    raise Unread("protected", f"{path} answered {status}: it {why} --engine-api-key-file")
                if status != 200:
                    is_gone = 300 <= status < 500 or status == 501
                    raise Unread("none" if is_gone else "failed", f"{path} answered {status}")
                while chunk := await response.content.readany():
                    size += len(chunk)
                    if size > most_bytes:
                        raise Unread("odd", f"{path} has more than {most_bytes // 2**20} MiB")
                    chunks.append(chunk)
        except TimeoutError:
            raise Unread("late", f"{path} took more than {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if (lack := lack_of(error)) is not None:
                self._lacks.note(lack)
            raise Unread("failed", f"{path}: {type(error).__name__}: {error}") from None
        return b"".join(chunks)
