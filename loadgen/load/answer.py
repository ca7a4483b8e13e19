"""The answer to one request: a streamed answer, read event by event as it arrives, or a plain body."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson

from engine.common.http.connection import Fields
from engine.common.sse import DONE_DATA, SseDecoder
from engine.contract import headers

DETAIL_CHARS = 300
_OF_TOKENS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""The fields of a delta in which tokens come. A delta with none of them adds no token to the answer."""
MAX_BODY_BYTES = 64 * 2**20
MAX_TOKENS = 2**31 - 1
"""The largest token count that a record can store."""
_POD, _POLICY = headers.POD.encode(), headers.POLICY.encode()


class StreamedAnswer:
    """Sink of a streamed completion. `done` is set when the stream has ended; `failure` tells whether it failed."""

    __slots__ = (
        *("done", "text", "token_times_s", "first_token_s"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "has_usage"),
        *("pod", "policy", "failure", "detail", "lost_connection", "finished_s"),
        *("_decoder", "_between", "_status", "_kind", "_error_body", "_stopped", "_complete", "_events"),
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.text: list[str] = []
        self.token_times_s: list[float] = []
        """Time of each token with text. An event that only opens a chat, ends it, or tells the usage has none. Tokens
        of one event have the same time, as far as the event says how many it has."""
        self.first_token_s: float | None = None
        """Time of the first event with a text, even an empty one, or of the answer's end. An event that only opens a
        chat with its role, or says nothing, does not count."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.has_usage = False
        self.pod = self.policy = ""
        self.failure: str | None = None
        self.detail = ""
        self.lost_connection = False
        self.finished_s = 0.0
        self._decoder = SseDecoder()
        self._between = True
        self._status = 0
        self._kind = ""
        self._error_body = b""
        self._stopped = False
        self._complete = False
        self._events = 0

    def head(self, status: int, fields: Fields, now_s: float) -> None:
        self._status = status
        headers = {name.lower(): value for name, value in fields}
        self.pod = headers.get(_POD, b"").decode("latin-1")
        self.policy = headers.get(_POLICY, b"").decode("latin-1")
        self._kind = headers.get(b"content-type", b"no content type").decode("latin-1")

    def body(self, data: bytes, now_s: float) -> None:
        if self.done.done():
            return
        if self._status != 200:
            self._error_body += data[: 4 * DETAIL_CHARS - len(self._error_body)]
            return
        try:
            for event in self._events_of(data):
                if event == DONE_DATA:
                    self._complete, self.finished_s = True, now_s
                else:
                    self._take(orjson.loads(event), now_s)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            self.fail("bad answer", f"{type(error).__name__} {error}", now_s)

    def _events_of(self, data: bytes) -> Iterable[bytes]:
        # Most reads bring exactly one event of one line. It needs no decoder, which saves a tenth of the client's CPU
        # time.
        whole = data.endswith(b"\n\n")
        if whole and self._between and data.startswith(b"data: "):
            event = data[6:-2]
            if b"\n" not in event and b"\r" not in event:
                return (event,)
        self._between = whole
        return self._decoder.feed(data)

    def end(self, now_s: float) -> None:
        if self._status != 200:
            self.fail(f"http {self._status}", self._error_body.decode(errors="replace"), now_s)
        elif self._complete and self._stopped:
            self._finish(self.finished_s)
        elif not self._events:
            self.fail("bad answer", f"no server-sent event in an answer of {self._kind}", now_s)
        else:
            self.fail("truncated", "the stream ended before its last event", now_s)

    def lost(self, reason: str, now_s: float) -> None:
        if self._complete and self._stopped:  # the answer needed no more bytes
            self._finish(self.finished_s)
        else:
            self.lost_connection = True
            self.fail("bad answer" if reason.startswith("not HTTP") else "disconnected", reason, now_s)

    def fail(self, label: str, detail: str, now_s: float) -> None:
        """End the answer as failed, unless it has already ended."""
        if not self.done.done():
            self.failure, self.detail = label, detail[:DETAIL_CHARS]
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        if not self.done.done():
            self.finished_s = now_s
            self.done.set_result(None)

    def _take(self, event: Any, now_s: float) -> None:
        self._events += 1
        if error := event.get("error"):
            words = str(error.get("message", error) if isinstance(error, dict) else error)
            self.fail("error event", words, now_s)
            return
        for choice in event.get("choices") or ():
            self._take_choice(choice, now_s)
        if usage := event.get("usage"):
            self.has_usage = True
            self.prompt_tokens = _count(usage, "prompt_tokens")
            self.output_tokens = _count(usage, "completion_tokens")
            self.cached_tokens = _count(usage.get("prompt_tokens_details") or {"cached_tokens": 0}, "cached_tokens")

    def _take_choice(self, choice: Any, now_s: float) -> None:
        delta = choice.get("delta")
        text = delta.get("content") if delta else choice.get("text")
        if text:
            if not isinstance(text, str):  # such as a list of parts
                raise TypeError(f"an event's text is a JSON {type(text).__name__}")
            self.text.append(text)
        has_tokens = bool(text or (delta and any(map(delta.get, _OF_TOKENS))))
        if has_tokens:
            self.token_times_s += [now_s] * _tokens_in(choice)
        if choice.get("finish_reason"):
            self._stopped = True
            if not self.token_times_s:  # an answer of one token without text
                self.token_times_s.append(now_s)
        elif not has_tokens and "text" not in choice and (not delta or "role" in delta or delta.get("content") is None):
            return  # this event opens the chat or keeps the connection open; engines may send it before the first token
        if self.first_token_s is None:
            self.first_token_s = now_s


def _tokens_in(choice: Any) -> int:
    """Return how many tokens an event with text brings: as many as it has ids or log-probabilities, else one."""
    logprobs = choice.get("logprobs") or {}
    listed = choice.get("token_ids") or logprobs.get("content") or logprobs.get("tokens") or ()
    return max(1, len(listed))


def _count(counts: Any, name: str) -> int:
    """Return a token count in an answer's usage. Raises ValueError, whose words are shown with the failure."""
    value = counts.get(name)
    if value is None and name == "cached_tokens":
        return 0
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError(f"usage has no number of {name}: {value!r:.40}")
    count = int(value)
    if not 0 <= count <= MAX_TOKENS:
        raise ValueError(f"usage has a count of {count:.3g} tokens")
    return count


class PlainAnswer:
    """Sink of a whole body. `done` returns status and body, or raises ConnectionError with the reason."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def head(self, status: int, fields: Fields, now_s: float) -> None:
        self._status = status

    def body(self, data: bytes, now_s: float) -> None:
        self._size += len(data)
        if self._size <= MAX_BODY_BYTES:
            self._parts.append(data)
        else:
            self.lost(f"the answer is larger than {MAX_BODY_BYTES} bytes", now_s)

    def end(self, now_s: float) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    def lost(self, reason: str, now_s: float) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(reason))
