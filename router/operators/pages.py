"""The handlers of /ui: the page, which loads nothing from elsewhere, and the stream of frames that it draws."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

from router.operators.live_feed import Live

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
"""Read when the program starts: reading it later would delay requests."""
TAKEN_S = 10.0
"""A viewer that reads nothing for this long has left."""
AGAIN_MS = 2000
"""A browser that has lost the stream reconnects after this."""
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Pages:
    """The handlers of /ui."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._page = PAGE.encode()
        self._headers = {
            "Content-Security-Policy": content_policy(PAGE),
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the page."""
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=self._headers)

    async def state(self, request: web.Request) -> web.Response:
        """Answer with the first frame of the stream, as JSON."""
        return web.Response(body=self._live.first_frame(), content_type="application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send frames as server-sent events until the viewer leaves. Raises TooManyViewers.

        https://html.spec.whatwg.org/multipage/server-sent-events.html
        """
        with self._live.viewer():
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
            response.headers["X-Accel-Buffering"] = "no"  # else nginx holds events back
            await response.prepare(request)
            number, frame, is_whole = self._live.number, self._live.first_frame(), True
            await response.write(b"retry: %d\n" % AGAIN_MS)
            try:
                while True:
                    async with asyncio.timeout(TAKEN_S):
                        await response.write(b"%bdata: %b\n\n" % (b"event: whole\n" if is_whole else b"", frame))
                    number, frame, is_whole = await self._live.next_frame(number)
            except (TimeoutError, ConnectionError):
                return response


def content_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only what is written in the page, and its own stream.

    https://www.w3.org/TR/CSP3/
    """
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for tag, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[tag].append(f"'sha256-{digest}'")
    scripts, styles = " ".join(digests["script"]), " ".join(digests["style"])
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
