"""The objects behind the HTTP routes: a loaded model, its step loop, and the state that /health reports."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from engine.common.otel.tracer import Tracer
from engine.contract.errors import BadRequest, TooManyRequests, Unavailable
from engine.grammar.allowed import AllowedTokens, HeldBack
from engine.grammar.compiler import GrammarCompiler
from engine.loop.metrics import EngineMetrics, RegistryState
from engine.loop.step_loop import EngineLoop
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler
from engine.server.choices import AnswerChoice
from engine.server.http.wire import RETRY_AFTER_S, BodyRoom
from engine.server.requests import GenerationJob, ModelText

P = ParamSpec("P")
T = TypeVar("T")


class TextWorkers:
    """A bounded thread pool for the work that takes longer for a longer prompt: parsing, rendering, tokenizing."""

    def __init__(self, threads: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._max_pending = max_pending
        self._pending = 0

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the call's result. Raises TooManyRequests if too many calls wait, and the call's own errors."""
        if self._pending >= self._max_pending:
            raise TooManyRequests("too many requests wait to be tokenized", retry_after_s=RETRY_AFTER_S)
        self._pending += 1
        loop = asyncio.get_running_loop()
        job = self._pool.submit(call, *args, **kwargs)
        # If the client leaves, a call that has not begun is dropped; a begun one counts until its thread is done.
        job.add_done_callback(lambda _: self._count_done(loop))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Start no more calls. Threads end after their present call."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_done(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called on the worker's thread."""
        with suppress(RuntimeError):  # the event loop has closed, so the count no longer matters
            loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        self._pending -= 1


@dataclass(frozen=True, slots=True)
class EngineService:
    """One engine that can serve."""

    model: ModelText
    loop: EngineLoop
    scheduler: Scheduler
    workers: TextWorkers
    metrics: EngineMetrics
    pod_id: str
    epoch: int
    registry: Callable[[], RegistryState]
    """Returns the present state of publishing."""
    on_fleet: Callable[[int], None]
    """Called when a gateway reports the number of engines that it follows."""
    grammars: GrammarCompiler
    created_s: int = field(default_factory=lambda: int(time.time()))
    surveying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a thread surveys the cache. Only one does so at a time: it shares the interpreter with all else."""
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_id(self) -> int:
        """Return the id of a further request for the scheduler."""
        return next(self._ids)

    def sequences(self, job: GenerationJob) -> tuple[list[Request], dict[int, AnswerChoice]]:
        """Return the job's requests for the scheduler, and the choice of each by request id. Called on a thread."""
        requests: list[Request] = []
        choices: dict[int, AnswerChoice] = {}
        for i, prompt in enumerate(job.prompts):
            hashed = self.scheduler.hash_prompt(prompt.tokens, job.salt, prompt.spans)
            for j in range(job.n):
                request = Request(
                    id=self.new_id(),
                    prompt_tokens=prompt.tokens,
                    max_tokens=prompt.max_tokens,
                    sampling=job.choice_sampling(i, j),
                    stop_token_ids=job.stop_token_ids | (self.model.eos_token_ids if job.constraint else frozenset()),
                    key_spans=prompt.spans,
                    salt=job.salt,
                    hashed=hashed,
                    marks=prompt.marks,
                    tools=prompt.tools,
                    output_tokens=list(prompt.answered),
                )
                requests.append(request)
                choices[request.id] = AnswerChoice(
                    len(choices),
                    i,
                    self.model.tokenizer,
                    job.stop,
                    logprobs=job.sampling.logprobs is not None,
                    context=prompt.context,
                    answered=len(prompt.answered),
                    answered_chars=prompt.answered_chars,
                    sends_ids=job.returns_token_ids,
                    shows_special=job.shows_special,
                    min_tokens=job.sampling.min_tokens,
                    reading=job.reading,
                )
        return requests, choices

    async def constrain(self, job: GenerationJob, requests: Sequence[Request]) -> None:
        """Give the job's requests the masks of its constraint. Raises BadRequest, TooManyRequests, Unavailable."""
        if job.constraint is None:
            return
        compiled = await self.grammars.compile(job.constraint)
        words, ends, held_back = self.grammars.words, self.model.eos_token_ids, []
        if ignored := ends - job.stop_token_ids:  # the constraint's end ends the answer even so
            held_back.append(HeldBack.of(ignored, sys.maxsize, words))
        if job.sampling.min_tokens:
            held_back.append(HeldBack.of(job.stop_token_ids | ends, job.sampling.min_tokens, words))
        for request in requests:
            masks = AllowedTokens(compiled, held_back)
            answered = request.output_tokens
            if answered and not await self.grammars.run(partial(masks.begin_after, answered)):
                raise BadRequest(
                    f"answer_so_far does not follow {job.constraint.param}", param="answer_so_far", code="invalid_value"
                )
            request.masks = masks


class ServerState:
    """Whether the engine is loading, serving or draining, and the number of requests being answered."""

    def __init__(self) -> None:
        self.service: EngineService | None = None
        self.tracer: Tracer | None = None
        """None if traces are off."""
        self.is_draining = False
        self.bodies = BodyRoom()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def status(self) -> str:
        """`ok`, or why the engine cannot take requests."""
        if self.is_draining:
            return "draining"
        if self.service is None:
            return "loading"
        return "ok" if self.service.loop.is_alive else "failed"

    def serving(self) -> EngineService:
        """Return the service if it takes requests. Raises Unavailable with the reason."""
        if self.status != "ok" or self.service is None:
            raise Unavailable(f"the engine cannot take requests: {self.status}", retry_after_s=RETRY_AFTER_S)
        return self.service

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request from its arrival to the end of its answer."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return not self._active

    async def wait_idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()
