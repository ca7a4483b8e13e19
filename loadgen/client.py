"""One streamed chat request over HTTP, timed. Every request ends in a record: a failure is a result like any other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from engine.contract import headers
from engine.contract.sse import SseDecoder
from loadgen.workload import Message

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request to make. `intended_s` is on the event loop's clock: when the user would have sent it."""

    session: int
    turn: int
    tenant: int | None
    messages: list[Message]
    max_tokens: int
    intended_s: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of a request. Times are seconds on the event loop's clock."""

    session: int
    turn: int
    tenant: int | None
    intended_s: float
    sent_s: float
    finished_s: float
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    """Times between consecutive chunks that carry text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    pod: str = ""
    policy: str = ""
    failure: str | None = None
    """None: completed. Else a short label to count by, such as 'timeout' or 'http 429'."""
    detail: str = ""
    """The failure in the words of the server or of the library."""


class _Failure(Exception):
    def __init__(self, label: str, detail: str) -> None:
        super().__init__(detail)
        self.label = label
        self.detail = detail


@dataclass(slots=True)
class _Progress:
    """What is known so far of a request under way."""

    text: list[str] = field(default_factory=list)
    chunk_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    pod: str = ""
    policy: str = ""
    finished: bool = False
    done: bool = False


class ChatClient:
    """Sends chat requests to one server. Use as an async context manager; `timeout_s` bounds a whole request."""

    def __init__(
        self, url: str, *, model: str = "", timeout_s: float = 60.0, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._timeout_s = timeout_s
        self._extra = dict(extra or {})

    async def __aenter__(self) -> Self:
        # No limit: an open loop must not queue in its own client. aiohttp sets TCP_NODELAY on each connection.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=120)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def model_id(self) -> str:
        """The model that requests name: the one given, else the first of `/v1/models`. Raises ServerUnusable."""
        if not self._model:
            listing = await self._json("GET", "/v1/models")
            models = listing.get("data") or []
            if not models:
                raise ServerUnusable(f"{self._url}/v1/models lists no model: is an engine ready?")
            self._model = str(models[0]["id"])
        return self._model

    async def warm_connections(self, count: int) -> None:
        """Open `count` connections that later requests reuse. Raises ServerUnusable."""
        await asyncio.gather(*(self._json("GET", "/v1/models") for _ in range(count)))

    async def reset_prefix_cache(self) -> str | None:
        """Empty the cache of every pod. None when done, else why the server refused."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.post(f"{self._url}/reset_prefix_cache") as response:
                    body = await response.text()
                    return None if response.ok else f"HTTP {response.status} {body[:200]}".strip()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__} {error}".strip()

    async def send(self, call: ChatCall, *, policy: str = "") -> tuple[RequestRecord, str]:
        """The record of the request and the answer's text. Raises nothing but cancellation."""
        clock = asyncio.get_running_loop().time
        progress = _Progress()
        sent_s = clock()
        label, detail = None, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(call, policy, progress)
        except _Failure as failure:
            label, detail = failure.label, failure.detail
        except TimeoutError:
            label, detail = "timeout", f"not finished within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            label, detail = "connect", str(error)
        except (aiohttp.ClientError, ConnectionError) as error:
            label, detail = "disconnected", f"{type(error).__name__} {error}".strip()
        return _record(call, progress, sent_s, clock(), label, detail), "".join(progress.text)

    async def _stream(self, call: ChatCall, policy: str, progress: _Progress) -> None:
        body = orjson.dumps(
            {
                "model": self._model,
                "messages": call.messages,
                "max_tokens": call.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            }
        )
        sent = {"content-type": "application/json"} | ({headers.POLICY: policy} if policy else {})
        async with self._http.post(self._url + CHAT_PATH, data=body, headers=sent) as response:
            progress.pod = response.headers.get(headers.POD, "")
            progress.policy = response.headers.get(headers.POLICY, "")
            if response.status != 200:
                raise _Failure(f"http {response.status}", (await response.text())[:300])
            await _read_events(response, progress)
        if not progress.done or not progress.finished:
            raise _Failure("truncated", "the stream ended before its last event")

    async def _json(self, method: str, path: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.request(method, self._url + path) as response:
                    body = await response.read()
                    if not response.ok:
                        raise ServerUnusable(f"{self._url}{path} answered HTTP {response.status}: {body[:200]!r}")
                    parsed = orjson.loads(body)
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise ServerUnusable(f"{self._url}{path}: {type(error).__name__} {error}".strip()) from None
        if not isinstance(parsed, dict):
            raise ServerUnusable(f"{self._url}{path} did not answer with a JSON object")
        return parsed


class ServerUnusable(Exception):
    """The server cannot be measured at all; the text says what it answered."""


async def _read_events(response: aiohttp.ClientResponse, progress: _Progress) -> None:
    clock = asyncio.get_running_loop().time
    decoder = SseDecoder()
    async for chunk in response.content.iter_any():
        now_s = clock()
        try:
            for data in decoder.feed(chunk):
                if data == b"[DONE]":
                    progress.done = True
                else:
                    _take_event(orjson.loads(data), now_s, progress)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _Failure("bad answer", f"{type(error).__name__} {error}") from None


def _take_event(event: Any, now_s: float, progress: _Progress) -> None:
    if error := event.get("error"):
        raise _Failure("error event", str(error.get("message", error) if isinstance(error, dict) else error)[:300])
    for choice in event.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            progress.text.append(text)
            progress.chunk_times_s.append(now_s)
        if choice.get("finish_reason"):
            progress.finished = True
            if not progress.chunk_times_s:  # an answer without text: its end is all the user sees
                progress.chunk_times_s.append(now_s)
    if usage := event.get("usage"):
        progress.has_usage = True
        progress.prompt_tokens = int(usage["prompt_tokens"])
        progress.output_tokens = int(usage["completion_tokens"])
        progress.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _record(
    call: ChatCall, progress: _Progress, sent_s: float, finished_s: float, failure: str | None, detail: str
) -> RequestRecord:
    times = progress.chunk_times_s
    return RequestRecord(
        session=call.session,
        turn=call.turn,
        tenant=call.tenant,
        intended_s=call.intended_s,
        sent_s=sent_s,
        finished_s=finished_s,
        first_token_s=times[0] if times else None,
        gaps_s=tuple(after - before for before, after in itertools.pairwise(times)),
        prompt_tokens=progress.prompt_tokens,
        cached_tokens=progress.cached_tokens,
        output_tokens=progress.output_tokens,
        has_usage=progress.has_usage,
        pod=progress.pod,
        policy=progress.policy,
        failure=failure,
        detail=detail,
    )
