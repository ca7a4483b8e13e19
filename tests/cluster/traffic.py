"""Steady streamed completions through a gateway; each is recorded with its times, its pod and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp

from engine.common.sse import SseDecoder
from engine.contract import headers

REQUEST_TIMEOUT_S = 60.0
TENANTS = 6


class Outcome(StrEnum):
    """The outcome of a request."""

    WHOLE = "whole"
    CUT = "cut"
    """The answer began but did not complete."""
    LOST = "lost"
    """No part of an answer came: refused, or the connection broke."""


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds of this machine's clock."""

    started_s: float
    outcome: Outcome = Outcome.LOST
    pod: str = ""
    first_byte_s: float | None = None
    ended_s: float = 0.0
    detail: str = ""


@dataclass(slots=True)
class Journal:
    """All requests that have ended so far."""

    records: list[Record] = field(default_factory=list)

    def outcomes(self) -> Counter[Outcome]:
        """Return the number of requests per outcome."""
        return Counter(record.outcome for record in self.records)

    def of(self, outcome: Outcome) -> list[str]:
        """Return what went wrong, with the request's times relative to the first request."""
        start_s = min(record.started_s for record in self.records)
        return [
            f"+{r.started_s - start_s:.2f}..{r.ended_s - start_s:.2f} s on {r.pod or 'no pod'}: {r.detail}"
            for r in self.records
            if r.outcome is outcome
        ]

    def since(self, start_s: float) -> Iterator[Record]:
        """Yield the requests that began at or after `start_s`."""
        return (record for record in self.records if record.started_s >= start_s)

    def pods(self) -> set[str]:
        """Return the pods that have answered."""
        return {record.pod for record in self.records if record.pod}

    def first_byte_from(self, pod: str) -> float | None:
        """Return when this pod's first answer began."""
        return min((r.first_byte_s for r in self.records if r.pod == pod and r.first_byte_s is not None), default=None)


async def send(session: aiohttp.ClientSession, url: str, body: Mapping[str, object], extra: dict[str, str]) -> Record:
    """Send one streamed completion and read it to its end. Server errors never raise."""
    record = Record(time.time())
    try:
        async with (
            asyncio.timeout(REQUEST_TIMEOUT_S),
            session.post(f"{url}/v1/chat/completions", json=body, headers=extra) as answer,
        ):
            record.pod = answer.headers.get(headers.POD, "")
            if answer.status != 200:
                record.detail = f"status {answer.status}: {(await answer.text())[:200]}"
                return record
            await _read(answer, record)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        record.detail = record.detail or f"{type(error).__name__}: {error}"
    finally:
        record.ended_s = time.time()
    return record


async def _read(answer: aiohttp.ClientResponse, record: Record) -> None:
    decoder, last = SseDecoder(), b""
    async for chunk in answer.content.iter_any():
        if record.first_byte_s is None:
            record.first_byte_s = time.time()
            record.outcome = Outcome.CUT
        for event in decoder.feed(chunk):
            last = event
            if b'"error"' in event:
                record.detail = event.decode()[:200]
    if last == b"[DONE]":
        record.outcome = Outcome.WHOLE


@contextlib.asynccontextmanager
async def traffic(
    url: str, *, model: str = "sim", rate: float = 12.0, policies: Collection[str] = ("", "round_robin")
) -> AsyncIterator[Journal]:
    """Send `rate` requests per second during the block, then let the started ones end.

    The requests alternate in policy (empty: the gateway's own), in connection (a new one, or one of a pool as in
    OpenAI's client) and in length: every tenth answer takes several seconds.
    """
    journal = Journal()
    rng = random.Random(7)
    fresh = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))
    pooled = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    stop = asyncio.Event()

    async def one(number: int, policy: str) -> None:
        body = {
            "model": model,
            "messages": [{"role": "system", "content": _handbook(number % TENANTS)}, _question(rng)],
            "max_tokens": 150 if number % 10 == 0 else 16,
            "ignore_eos": True,
            "stream": True,
        }
        extra = {headers.POLICY: policy} if policy else {}
        journal.records.append(await send((fresh, pooled)[number // 2 % 2], url, body, extra))

    async def generate() -> None:
        async with asyncio.TaskGroup() as group:
            for number, policy in zip(itertools.count(), itertools.cycle(policies), strict=False):
                if stop.is_set():
                    return
                group.create_task(one(number, policy))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.expovariate(rate)):
                        await stop.wait()

    async with fresh, pooled:
        task = asyncio.create_task(generate())
        try:
            yield journal
        finally:
            stop.set()
            await task


def _handbook(tenant: int) -> str:
    return f"You are assistant number {tenant} of the service desk and know its handbook by heart. " * 12


def _question(rng: random.Random) -> dict[str, str]:
    return {"role": "user", "content": f"Request {rng.random()}: {'please answer ' * rng.randrange(1, 8)}"}
