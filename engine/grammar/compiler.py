"""Compiles constraints on threads, in bounded time and memory, and keeps the compiled ones."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.contract.errors import BadRequest, TooManyRequests, Unavailable
from engine.grammar.allowed import SLOW_S, Compiled, MaskTimes
from engine.grammar.constraint import Constraint, Kind
from engine.grammar.fills import MaskFills
from engine.grammar.trial import Trial, TrialFailed, limits
from engine.grammar.vocabulary import Vocabulary

THREADS = 2
"""Constraints that are compiled at the same time, and processes for their trials."""
MAX_TEXT_BYTES = 2**18
"""Of a constraint's text. The largest schemas of tools have some 50 KB."""
MAX_PENDING = 64
"""Most constraints that are compiled or wait for it; further ones get 429."""
WAIT_S = 10.0
"""The most time that a request waits for its constraint."""
KEPT = 512
"""Most constraints that are kept, refused ones included."""
KEPT_BYTES = 2**28
"""The most memory of the kept constraints."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class _Refused:
    """A constraint that cannot be used."""

    reason: str
    held_bytes: int = 0


class GrammarCompiler:
    """Compiles constraints for one model. Methods are called on the event loop."""

    def __init__(
        self, vocabulary: Vocabulary, wake: Callable[[], None], observe: Callable[[str, float], None] | None = None
    ) -> None:
        """`wake`: see `MaskFills`. `observe`: called for each request with `compiled`, `kept` or `refused`, and the
        seconds that took."""
        self._vocabulary = vocabulary
        self._observe = observe or (lambda result, elapsed_s: None)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._trials: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        self._all_trials = [Trial(vocabulary.size, vocabulary.special, sorted(vocabulary.ends)) for _ in range(THREADS)]
        for trial in self._all_trials:
            self._trials.put(trial)
        self.fills = MaskFills(wake)
        self.times = MaskTimes()
        """Of all masks of this engine."""
        self._kept: OrderedDict[Constraint, Compiled | _Refused] = OrderedDict()
        self._kept_bytes = 0
        self._pending: dict[Constraint, asyncio.Future[Compiled | _Refused]] = {}

    @property
    def words(self) -> int:
        """Length of a mask."""
        return -(-self._vocabulary.size // 32)

    async def compile(self, constraint: Constraint) -> Compiled:
        """Return the compiled constraint. Raises BadRequest naming its field and what is wrong; TooManyRequests and
        Unavailable if the engine cannot compile it now."""
        begun_s = time.perf_counter()
        found = self._kept.get(constraint)
        how = "kept"
        if found is None:
            how = "compiled"
            found = await self._wait(constraint)
        else:
            self._kept.move_to_end(constraint)
        if isinstance(found, _Refused):
            self._observe("refused", time.perf_counter() - begun_s)
            raise BadRequest(
                f"{constraint.param} cannot be followed: {found.reason}",
                param=constraint.param,
                code="unsupported_constraint",
            )
        self._observe(how, time.perf_counter() - begun_s)
        return found

    async def run(self, call: Callable[[], bool]) -> bool:
        """Return the result of the call, made on one of the threads: for work that takes longer for longer answers."""
        return await asyncio.wrap_future(self._pool.submit(call))

    async def close(self) -> None:
        """Compile no more, compute no more masks, and end the processes."""
        self.fills.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._close_trials)

    def _close_trials(self) -> None:
        for trial in self._all_trials:
            trial.stop()
        self._pool.shutdown(wait=True)
        for trial in self._all_trials:
            trial.close()

    async def _wait(self, constraint: Constraint) -> Compiled | _Refused:
        pending = self._pending.get(constraint)
        if pending is None:
            if len(constraint.text) > MAX_TEXT_BYTES:
                return _Refused(f"it has more than {MAX_TEXT_BYTES} characters")
            if len(self._pending) >= MAX_PENDING:
                raise TooManyRequests("too many constraints wait to be compiled", retry_after_s=RETRY_AFTER_S)
            pending = asyncio.wrap_future(self._pool.submit(self._build, constraint))
            self._pending[constraint] = pending
            pending.add_done_callback(partial(self._keep, constraint))
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(pending)  # others may wait for it, too
        except TimeoutError:
            raise Unavailable(
                f"{constraint.param} is not compiled within {WAIT_S:g} s, because other constraints are before it",
                param=constraint.param,
                retry_after_s=RETRY_AFTER_S,
            ) from None

    def _keep(self, constraint: Constraint, done: asyncio.Future[Compiled | _Refused]) -> None:
        del self._pending[constraint]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[constraint] = done.result()
        self._kept_bytes += _bytes_of(constraint, done.result())
        while len(self._kept) > KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= _bytes_of(*self._kept.popitem(last=False))

    def _build(self, constraint: Constraint) -> Compiled | _Refused:
        """Runs on a thread of the pool."""
        if (tokenizer := self._vocabulary.tokenizer) is None:
            return _Refused(self._vocabulary.obstacle)
        trial = self._trials.get()
        try:
            grammar, held_bytes = trial.run(constraint.kind, constraint.text)
        except TrialFailed as error:
            return _Refused(_plain(str(error), constraint.kind))
        finally:
            self._trials.put(trial)
        return self._compiled(tokenizer, grammar, held_bytes, constraint.kind)

    def _compiled(self, tokenizer: LLTokenizer, grammar: str, held_bytes: int, kind: Kind) -> Compiled | _Refused:
        start = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if start.is_error():
            return _Refused(_plain(start.get_error(), kind))
        first = np.zeros(self.words, dtype=np.int32)
        begun_s = time.thread_time()
        start.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        elapsed_s = time.thread_time() - begun_s
        if start.is_error() or not first.any():
            return _Refused(_plain(start.get_error(), kind) if start.is_error() else "no text follows it")
        return Compiled(start, first, held_bytes, self.times, is_slow=elapsed_s > 4 * SLOW_S)


def _bytes_of(constraint: Constraint, found: Compiled | _Refused) -> int:
    return len(constraint.text) + found.held_bytes


def _plain(error: str, kind: Kind) -> str:
    """Return the library's error, without the grammar that it repeats."""
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no text follows it")
    if reason := next((line.strip() for line in error.splitlines() if line.strip().startswith("error:")), ""):
        return f"{line.partition(chr(34))[0].strip()} {reason}"[:500]  # without the expression that it repeats
    if "NoExtension" in line:
        return "no text follows it"
    if kind is Kind.JSON:
        line = line.removeprefix("failed to compile JSON schema: ")
    return line[:500]
