"""A headless Chromium, driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

DEADLINE_S = 60.0
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-extensions",
    ),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--hide-scrollbars", "--disable-background-networking"),
)


class Browser:
    """One page. `problems`: exceptions that the page threw, and errors in its log."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, folder: Path) -> AsyncIterator[Browser]:
        """Yield a browser of its own, with its files in `folder`. The browser ends with the block."""
        process = await asyncio.create_subprocess_exec(
            "chromium",
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(DEADLINE_S):
                port = 0
                async for line in process.stderr:
                    if found := re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
                        port = int(found[1])
                        break
            drain = asyncio.create_task(process.stderr.read())  # otherwise Chromium stops when the pipe is full
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=2**26) as socket:
                    browser = cls(socket)
                    reading = asyncio.create_task(browser._read())
                    try:
                        for domain in ("Page", "Runtime", "Log"):
                            await browser._ask(f"{domain}.enable")
                        yield browser
                    finally:
                        reading.cancel()
                        await asyncio.wait((reading,))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await drain

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if (waiting := self._waiting.pop(said.get("id", 0), None)) is not None:
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])

    async def _ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            said = await answer
        return said.get("result") or {"result": {}, "refused": said}

    async def open(self, url: str) -> None:
        """Open the address and wait until the page has loaded."""
        await self._ask("Page.navigate", url=url)
        end_s = time.monotonic() + DEADLINE_S
        while True:
            # While one page replaces another, there may be no page to ask.
            said = await self._ask(
                "Runtime.evaluate", expression="location.href + document.readyState", returnByValue=True
            )
            if said["result"].get("value") == f"{url}complete":
                return
            assert time.monotonic() < end_s, f"{url} never loaded: {said}"
            await asyncio.sleep(0.05)

    async def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        said = await self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert not said.keys() & {"exceptionDetails", "refused"}, said
        return said["result"].get("value")

    async def until(self, expression: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the expression is true. It may fail until then, because the page is not there at once."""
        end_s = time.monotonic() + deadline_s
        asked = f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"
        while not await self.run(asked):
            assert time.monotonic() < end_s, f"never true: {expression}; {self.problems}"
            await asyncio.sleep(0.05)

    async def looks(self, width: int, scheme: str, height: int = 1000) -> None:
        """Show the page `width` pixels wide, in a `light` or `dark` scheme."""
        await self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self) -> bytes:
        """Return a PNG of what the browser shows."""
        return base64.b64decode((await self._ask("Page.captureScreenshot", format="png"))["data"])
