"""Ask an engine whose stream is silent whether it still makes tokens.

Parsers of tool calls and of reasoning hold back text for a minute and more, so silence is no proof of death. Neither is
an answer to `/health` a proof of life: the HTTP server often answers while the engine behind it hangs. Tokens that are
counted are one.
"""

from __future__ import annotations

import asyncio
import re
from enum import Enum, auto

from router.fleet.fetch import Fetch, Unread
from router.fleet.pod import Pod
from router.fleet.scrape import metrics_url

LOOKS = 5
"""How often the count of tokens is read. A long prefill may hold up all other requests for seconds."""
PAUSE_S = 1.0
DEADLINE_S = 2.0
MAX_PAGE_BYTES = 4 * 2**20
HEALTH_BYTES = 2**16
_MADE = re.compile(rb"^(?:vllm|sglang):generation_tokens_total(?:\{[^\n]*\})? ([0-9.eE+]+)", re.MULTILINE)


class Vitals(Enum):
    """What an engine showed when it was asked."""

    WORKS = auto()
    """It made tokens meanwhile."""
    STANDS = auto()
    """It made no token, or gave no answer."""
    UNKNOWN = auto()
    """It says that it is well, and does not count its tokens."""


class VitalSigns:
    """Looks at engines; at one of them only once at a time."""

    def __init__(self, fetch: Fetch, port: int | None = None, pause_s: float = PAUSE_S) -> None:
        """`port`: TCP port of the metrics; None: the engine's own; 0: metrics are not read."""
        self._fetch = fetch
        self._port = port
        self._pause_s = pause_s
        self._looks: dict[str, asyncio.Task[Vitals]] = {}

    async def look(self, pod: Pod) -> Vitals:
        """Return what the pod's engine shows, within LOOKS * (PAUSE_S + DEADLINE_S)."""
        look = self._looks.get(pod.url)
        if look is None:
            look = self._looks[pod.url] = asyncio.create_task(self._look(pod))
            look.add_done_callback(lambda _: self._looks.pop(pod.url, None))
        return await asyncio.shield(look)  # several streams of a pod fall silent together

    async def _look(self, pod: Pod) -> Vitals:
        first = await self._made(pod)
        if first is None:
            return await self._health(pod)
        for _ in range(LOOKS - 1):
            await asyncio.sleep(self._pause_s)
            made = await self._made(pod)
            if made is not None and made != first:
                return Vitals.WORKS
        return Vitals.STANDS

    async def _made(self, pod: Pod) -> float | None:
        """Return the tokens that the engine has made; None if it does not say."""
        if self._port == 0:
            return None
        try:
            body = await self._fetch(pod.url, metrics_url(pod.url, self._port), DEADLINE_S, MAX_PAGE_BYTES)
        except Unread:
            return None
        found = _MADE.findall(body)
        try:
            return sum(map(float, found)) if found else None
        except ValueError:
            return None

    async def _health(self, pod: Pod) -> Vitals:
        try:
            await self._fetch(pod.url, f"{pod.url}/health", DEADLINE_S, HEALTH_BYTES)
        except Unread:
            return Vitals.STANDS
        return Vitals.UNKNOWN
