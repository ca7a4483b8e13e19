"""Read heavy bodies in a process of their own, so that they do not hold up the requests of others.

Of text, the event loop reads a megabyte in a few milliseconds. But a body of 480 KB can have 60,000 objects, which take
80 ms to read: a client who sends such bodies again and again would take the whole event loop. Tenants take turns, one
body at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from engine.contract.errors import ApiError, Unavailable
from router.edge.body import joined
from router.reading.inbound import ModelEstimates, ModelNames, Reader, Rules, Salts
from router.reading.jobs import Job
from router.reading.reader_program import (
    ABANDONED,
    ASKS,
    FAILED,
    HEAD,
    INBOUND,
    WANTS_WORDS,
    unpacked,
)
from router.tenants.tenant import Tenant

log = logging.getLogger(__name__)

LIGHT_BYTES = 2**14
"""A shorter body is always light."""
HEAVY_US = 2500.0
"""A body that the event loop would take so long to read is heavy. Sending it to the other process and back takes about
500 us."""
NODE_US = 0.8
"""Per list, object and field: 60,000 parts of a message's content, 3 of these each, take 110 ms."""
VALUE_US = 0.06
"""Per entry of a list or an object: a prompt of a million token ids takes 55 ms."""
BYTE_US = 0.004
"""Per byte: a prompt of a megabyte of text takes 4 ms."""
JOB_S = 60.0
"""Longest time for a job, with the start of the process. The bounds on bodies keep each job to about a second."""
PIECE_BYTES = 2**18
PAUSE_S = 0.5
"""Seconds before a process that ended starts anew."""
PROGRAM = "router.reading.reader_program"
Result = TypeVar("Result")


def weight_us(body: bytes) -> float:
    """Return about how long a body takes to read, in microseconds on a processor of 2021.

    Characters inside of strings are counted too, so a text with many colons seems heavier than it is.
    """
    if len(body) < LIGHT_BYTES:
        return 0.0
    if len(body) * BYTE_US >= HEAVY_US:  # counting would take long
        return BYTE_US * len(body)
    nodes = body.count(b"{") + body.count(b"[") + body.count(b":")
    return BYTE_US * len(body) + NODE_US * nodes + VALUE_US * body.count(b",")


class _WordsWanted(Exception):
    """The model depends on the conversation's first words."""


@dataclass(slots=True, eq=False)
class _Waiting:
    job: Job[Any]
    body: bytes
    result: asyncio.Future[Any]


class _Process:
    """The process's end of the socket, as the gateway sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, value: object, body: bytes = b"") -> None:
        """Send a message."""
        data = pickle.dumps(value)
        self._writer.write(HEAD.pack(len(data), len(body)) + data)
        self._writer.write(body)

    async def read(self) -> tuple[Any, bytes]:
        """Return the next message and its body."""
        size, missing = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        value = pickle.loads(await self._reader.readexactly(size))
        pieces = []
        while missing:
            pieces.append(piece := await self._reader.read(min(missing, PIECE_BYTES)))
            missing -= len(piece)
            if not piece:
                raise EOFError
        return value, await joined(pieces)


class BodyReader:
    """Runs jobs: light ones at once, heavy ones in the process, which starts with the first or with `start`.

    The jobs that wait have no bound of their own: each holds its body, and Admission bounds bodies.
    """

    def __init__(self, models: ModelNames, estimates: ModelEstimates, isolation: Salts | None, rules: Rules) -> None:
        """See Reader."""
        self.here = Reader(models, estimates, isolation, rules)
        """Reads in the event loop."""
        self.ended = 0
        """Processes that ended or hung."""
        self.heavy = 0
        """Heavy bodies so far."""
        self._models = models
        self._estimates = estimates
        self._isolation = isolation
        self._rules = rules
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Jobs by tenant; the tenant whose turn is next comes first."""
        self._is_wanted = asyncio.Event()

    def start(self) -> None:
        """Start the process, so that the first heavy body need not wait for that."""
        self._is_wanted.set()

    def tokens(self, model: str, size: int) -> int:
        """Estimate the tokens of a text of `size` bytes for a model of the fleet."""
        return max(1, round(size * self._estimates.of(model).tokens_per_byte))

    async def read(
        self, job: Job[Result], body: bytes, on_wait: Callable[[], None] = lambda: None, *, more: bytes = b""
    ) -> Result:
        """Return the result of a job. `more`: what the job reads besides the body. `on_wait` is called before a wait.
        Raises ApiError."""
        if weight_us(body) + weight_us(more) < HEAVY_US:
            return job.run(self.here, body)
        on_wait()
        self.heavy += 1
        waiting = _Waiting(job.portable(), body, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(job.tenant.name, deque()).append(waiting)
        self._is_wanted.set()
        return cast(Result, await waiting.result)

    async def serve(self) -> None:
        """Keep the process running, until cancelled."""
        while True:
            await self._is_wanted.wait()
            try:
                async with self._process() as process:
                    while True:
                        self._is_wanted.clear()
                        while (waiting := self._next()) is not None:
                            await self._do(process, waiting)
                        await self._is_wanted.wait()
            except (OSError, EOFError, TimeoutError, pickle.PickleError) as error:
                self.ended += 1
                log.error("the process that reads heavy bodies has ended, or hangs: %r; it starts anew", error)
                await asyncio.sleep(PAUSE_S)

    def _next(self) -> _Waiting | None:
        """Return the next job that is still wanted, of the tenant whose turn it is."""
        while self._waiting:
            name, jobs = self._waiting.popitem(last=False)
            waiting = jobs.popleft()
            if jobs:
                self._waiting[name] = jobs
            if not waiting.result.done():
                return waiting
        return None

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[_Process]:
        """Run the process during the block."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failing:
            failing.callback(ours.close)
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", PROGRAM, stdin=theirs.fileno())
            failing.pop_all()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            started = _Process(reader, writer)
            started.send((self._rules, self._isolation is not None))
            yield started
        finally:
            writer.transport.abort()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _do(self, process: _Process, waiting: _Waiting) -> None:
        """Run one job. If the process cannot go on, its client gets an error, and the exception says why."""
        try:
            async with asyncio.timeout(JOB_S):
                await self._talk(process, waiting)
        finally:
            if not waiting.result.done():
                waiting.result.set_exception(
                    Unavailable("the request body could not be read: send it again", code="reader_ended")
                )

    async def _talk(self, process: _Process, waiting: _Waiting) -> None:
        """Send the job, answer the questions, and take the result, which the client may no longer want."""
        process.send((waiting.job, self._isolation is not None and self._isolation.has_secret), waiting.body)
        while True:
            (kind, value), body = await process.read()
            if kind != ASKS:
                break
            process.send(self._answered(value, waiting))
            if waiting.result.done():
                return
        if waiting.result.done():
            return
        if kind == FAILED:
            waiting.result.set_exception(value)
        elif kind == INBOUND:
            inbound, keys, is_same = value
            waiting.result.set_result(unpacked(inbound, keys, waiting.body if is_same else body))
        else:
            waiting.result.set_result(value)

    def _answered(self, question: tuple[Any, ...], waiting: _Waiting) -> Any:
        """Return the answer to a question about the job."""
        if waiting.result.done():
            return ABANDONED
        try:
            return self._answer(*question, tenant=waiting.job.tenant)
        except _WordsWanted:
            return WANTS_WORDS
        except ApiError as error:
            waiting.result.set_exception(error)
            return ABANDONED

    def _answer(self, name: str, asked: Any, words: bytes | None = None, *, tenant: Tenant) -> Any:
        if name == "meant":
            return self._models.meant(asked, tenant, lambda: _given(words))
        if name == "find":
            return self._models.find(asked, tenant)
        if name == "estimate":
            return self._estimates.of(asked)
        assert name == "salt"
        assert self._isolation is not None
        return self._isolation.salt(tenant, asked)


def _given(words: bytes | None) -> bytes:
    if words is None:
        raise _WordsWanted
    return words
