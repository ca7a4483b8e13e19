"""Streamed requests to one server, timed. Every request ends in a record: a failure is a result like any other."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson
from xxhash import xxh3_64_intdigest

from engine.common.http.connection import Connection
from engine.common.http.pool import Pool
from engine.contract import headers
from engine.contract.keys import canonical_chat, key_seed, prefix_keys
from engine.contract.resets import pauses_s, refusal
from loadgen.load.answer import DETAIL_CHARS, PlainAnswer, StreamedAnswer
from loadgen.load.clock import clock_of
from loadgen.load.target import CONNECT, PATHS, Call, ServerUnusable, Target, prompt_text
from loadgen.measure.records import RequestRecord

RESETS = ("/reset_prefix_cache", "/flush_cache")
"""The first path is for our gateway and vLLM, the second for SGLang."""
STALE_S = 0.25
"""If a used connection is lost this soon without an answer, the server closed it while the request was on its way."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A cache was not emptied. `is_in_use`: requests hold blocks of the cache, so another attempt may succeed."""

    words: str
    is_in_use: bool = False


class Client:
    """Sends requests to one target. Use as an async context manager; call `model_id()` before the first `call`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._model = target.model
        self._run_id = secrets.token_hex(4)
        self._numbers = itertools.count()
        self.stale_connections = 0
        """Requests sent a second time because the server had closed an idle connection."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._clock = clock_of(self._loop)
        self._pool = Pool(self.target.address(), self._clock)
        self._head = self.target.head("POST", PATHS[self.target.endpoint])
        self._seed = key_seed(self._model)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.close()

    # -- requests that are measured ------------------------------------------------------------------------------

    def call(
        self,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int,
        *,
        session: int = -1,
        turn: int = 0,
        after: int = -1,
        group: str = "",
        intended_s: float = math.nan,
        deadline_s: float = math.inf,
    ) -> Call:
        """Return a request with its body and its prompt's fingerprints. Making them takes tens of us, so do it ahead of
        time."""
        target = self.target
        if target.endpoint == "chat":
            prompt: dict[str, Any] = {"messages": messages}
            canonical = canonical_chat(messages)
        else:
            text = prompt_text(messages)
            prompt, canonical = {"prompt": text}, text.encode()
        fields = {
            "model": self._model,
            **prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.extra,
        }
        return Call(
            body=orjson.dumps(fields),
            session=session,
            turn=turn,
            after=after,
            group=group,
            intended_s=intended_s,
            deadline_s=deadline_s,
            prompt_bytes=len(canonical),
            prompt_hash=xxh3_64_intdigest(canonical),
            prefix_keys=prefix_keys(canonical, self._seed) if target.prefix_keys else (),
        )

    async def send(self, call: Call) -> tuple[RequestRecord, str]:
        """Return the request's record and the answer's text. Raises only cancellation, which closes the connection.

        A request is sent a second time, on a new connection, in one case only: it went out on a used connection that
        was lost within STALE_S, before the first byte of the answer. In that case, the server closed the idle
        connection at the same moment.
        """
        sent_s = self._clock()
        fields = f"{headers.REQUEST_ID}: wr-{self._run_id}-{next(self._numbers):x}\r\ncontent-length: {len(call.body)}"
        head = b"%b%b\r\n\r\n" % (self._head, fields.encode())
        if (connection := self._pool.take()) is not None:
            answer = await self._exchange(connection, head, call, sent_s)
            stale = answer.lost_connection and not connection.answered and answer.finished_s - sent_s < STALE_S
            if not stale:
                return self._record(call, answer, sent_s)
            self.stale_connections += 1
        answer = await self._exchange(None, head, call, sent_s)
        return self._record(call, answer, sent_s)

    async def _exchange(self, connection: Connection | None, head: bytes, call: Call, sent_s: float) -> StreamedAnswer:
        answer = StreamedAnswer(self._loop)
        timeout_s = sent_s + self.target.timeout_s
        if call.deadline_s < timeout_s:
            due_s, reason = call.deadline_s, ("cut off", "in flight when the run's time was up")
        else:
            due_s, reason = timeout_s, ("timeout", f"not finished within {self.target.timeout_s:g} s")
        if connection is None:
            try:
                async with asyncio.timeout_at(due_s):
                    connection = await self._pool.connect()
            except TimeoutError as error:
                # The event loop's deadline has passed, or the kernel has given up on a silent host.
                label, words = (CONNECT, str(error)) if str(error) else reason
                answer.fail(label, words, self._clock())
                return answer
            except OSError as error:
                answer.fail(CONNECT, f"{type(error).__name__} {error}", self._clock())
                return answer
        timer = self._loop.call_at(due_s, lambda: answer.fail(*reason, self._clock()))
        try:
            connection.request(head, call.body, answer)
            await answer.done
        finally:
            timer.cancel()
            connection.drop(answer)
        return answer

    def _record(self, call: Call, answer: StreamedAnswer, sent_s: float) -> tuple[RequestRecord, str]:
        times = answer.token_times_s
        record = RequestRecord(
            session=call.session,
            turn=call.turn,
            after=call.after,
            group=call.group,
            intended_s=sent_s if math.isnan(call.intended_s) else call.intended_s,
            sent_s=sent_s,
            finished_s=answer.finished_s,
            first_token_s=answer.first_token_s,
            last_token_s=times[-1] if times else answer.first_token_s,
            gaps_s=tuple([after - before for before, after in itertools.pairwise(times)]),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            has_usage=answer.has_usage,
            pod=answer.pod,
            policy=answer.policy,
            failure=answer.failure,
            detail=answer.detail,
            prompt_bytes=call.prompt_bytes,
            prompt_hash=call.prompt_hash,
            prefix_keys=call.prefix_keys,
            queued_s=call.queued_s,
        )
        return record, "".join(answer.text)

    # -- requests that are not measured --------------------------------------------------------------------------

    async def model_id(self) -> str:
        """Return the model that requests name: the given one, else the first of `/v1/models`. Raises ServerUnusable."""
        if not self._model:
            try:
                self._model = str(orjson.loads(await self.get_text("/v1/models"))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ServerUnusable(
                    f"{self.target.origin}/v1/models lists no model: is an engine ready? If so, name the model"
                ) from None
            self._seed = key_seed(self._model)
        return self._model

    async def get_text(self, path: str) -> str:
        """Return the body of a GET. Raises ServerUnusable on any status except 200, or without an answer."""
        status, body = await self._plain("GET", path)
        if status != 200:
            raise ServerUnusable(f"{self.target.origin}{path} answered HTTP {status}: {_words(body)}")
        return body.decode(errors="replace")

    async def reset_prefix_cache(self) -> str | None:
        """Empty the cache of every pod. Return None if this worked, else why the server refused.

        The reset is repeated for up to `resets.REPEATED_S` while the server says that blocks are in use.
        """
        refused = await self._reset()
        for pause_s in pauses_s() if refused is not None and refused.is_in_use else ():
            await asyncio.sleep(pause_s)
            refused = await self._reset()
            if refused is None or not refused.is_in_use:
                break
        return None if refused is None else refused.words

    async def _reset(self) -> _Refused | None:
        refusals = []
        for path in RESETS:
            try:
                status, body = await self._plain("POST", path)
            except ServerUnusable as error:
                return _Refused(str(error))
            if status < 300:
                said = refusal(body)
                return None if said is None else _Refused(f"POST {path}: {said}", is_in_use=True)
            refusals.append(f"POST {path}: HTTP {status} {_words(body)}".strip())
            if status not in (404, 405):
                break
        return _Refused("; ".join(refusals))

    async def _plain(self, method: str, path: str) -> tuple[int, bytes]:
        data = self.target.head(method, path) + b"content-length: 0\r\n\r\n"
        connection, answer = None, PlainAnswer(self._loop)
        try:
            async with asyncio.timeout(self.target.timeout_s):
                connection = await self._pool.connect()  # a new one: never stale, never one that is measured
                connection.request(data, b"", answer)
                return await answer.done
        except (OSError, TimeoutError) as error:
            words = f"{type(error).__name__} {error}".strip()
            raise ServerUnusable(f"{self.target.origin}{path}: {words}") from None
        finally:
            if connection is not None:
                connection.drop(answer)


def _words(body: bytes) -> str:
    return body[:DETAIL_CHARS].decode(errors="replace").strip()
