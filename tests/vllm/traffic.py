"""Continuous streams that must all be whole: what clients see while servers fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from engine.common.sse import SseDecoder
from engine.contract import headers
from tests.vllm.servers import MODEL

OUTPUT_TOKENS = 24
LATEST_S = 60.0
"""Seconds after which a stream that has not ended has failed."""


class Traffic:
    """A constant number of streams at a time. `failures` has a line for each stream that was not whole."""

    def __init__(self, url: str, streams: int) -> None:
        self._url = url
        self._streams = streams
        self._numbers = itertools.count()
        self._stopped = False
        self.done = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession()
        self._tasks = [asyncio.create_task(self._send()) for _ in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        try:
            await asyncio.wait(self._tasks, timeout=LATEST_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._http.close()

    async def _send(self) -> None:
        while not self._stopped:
            number, sent_s = next(self._numbers), time.monotonic()
            try:
                async with asyncio.timeout(LATEST_S):
                    await stream(self._http, self._url, f"{number} " * 40, OUTPUT_TOKENS)
            except (AssertionError, aiohttp.ClientError, TimeoutError) as failure:
                self.failures.append(f"request {number} after {time.monotonic() - sent_s:.1f} s: {failure!r}")
            self.done += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - sent_s)


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    prompt: str,
    tokens: int,
    *,
    on_pod: Callable[[str], object] = lambda pod: None,
) -> dict[str, Any]:
    """Return the usage of a whole stream. Raise AssertionError for any other stream. `on_pod` is called with the
    pod's name when the first token comes."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events: list[bytes] = []
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, f"{answer.status}: {await answer.text()}"
        on_pod(answer.headers[headers.POD])
        decoder = SseDecoder()
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async for chunk in answer.content.iter_any():
                events += decoder.feed(chunk)
    return account(events, tokens)


def account(events: Sequence[bytes], tokens: int) -> dict[str, Any]:
    """Return the usage of a stream with one finish reason and `tokens` tokens. Raise AssertionError for any other."""
    assert events[-1:] == [b"[DONE]"], f"a stream that ends in {events[-1:]}"
    parsed = [orjson.loads(event) for event in events[:-1]]
    reasons = [choice["finish_reason"] for event in parsed for choice in event["choices"] if choice["finish_reason"]]
    assert reasons == ["length"], f"the reasons {reasons}, in a stream that ends in {events[-3:]}"
    usage: dict[str, Any] = parsed[-1]["usage"]
    # If another server gave the rest, it tokenized the text so far anew, which gives other counts for random text.
    assert tokens / 2 <= usage["completion_tokens"] <= 2 * tokens, usage
    return usage
