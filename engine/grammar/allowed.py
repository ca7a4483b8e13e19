"""The tokens that may come next in one answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher  # needed by whoever compiles constraints, not by whoever only computes

Mask = NDArray[np.int32]
"""[ceil(vocabulary / 32)]: bit i of word w stands for token 32 w + i; 1: it may come next."""
SLOW_S = 0.005
"""A request whose mask took more processor time than this waits for its masks outside of the steps."""
WAIT_S = 2.0
"""The most time that a step waits for a mask: the library bounds a mask to some 10 ms of processor time."""


class MaskTimes:
    """What masks took, since the start. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._masks = 0
        self._computing_s = self._waited_s = 0.0

    def computed(self, elapsed_s: float) -> None:
        """Add a mask, with its processor time."""
        with self._lock:
            self._masks += 1
            self._computing_s += elapsed_s

    def waited(self, elapsed_s: float) -> None:
        """Add the time that a step waited for a mask."""
        with self._lock:
            self._waited_s += elapsed_s

    def all(self) -> tuple[int, float, float]:
        """Return the masks, the seconds of computing and those of waiting."""
        return self._masks, self._computing_s, self._waited_s


@dataclass(slots=True)
class Compiled:
    """A compiled constraint. Only `is_slow` ever changes."""

    start: LLMatcher
    """The state before the first token; answers begin with copies of it."""
    first: Mask
    """The tokens that may come first."""
    held_bytes: int
    """Bytes of memory, about."""
    times: MaskTimes
    is_slow: bool = False
    """Whether a mask has taken more than `SLOW_S`."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Tokens that may not come before an output index, unless no other token may come."""

    others: Mask
    """All tokens except these."""
    until: int

    @classmethod
    def of(cls, tokens: Collection[int], until: int, words: int) -> HeldBack:
        """Return the rule for masks of so many words. Tokens beyond them are left out."""
        bits = np.ones(words * 32, dtype=np.uint8)
        bits[[token for token in tokens if 0 <= token < words * 32]] = 0
        return cls(np.packbits(bits, bitorder="little").view(np.int32), until)


class AllowedTokens:
    """The masks of one answer, in the order of its tokens: each is computed once, by `push`, on any thread.

    `mask` may be called on another thread, and waits for it.
    """

    def __init__(self, compiled: Compiled, held_back: Sequence[HeldBack] = ()) -> None:
        self._compiled = compiled
        self._matcher = compiled.start.deep_copy()
        self._held_back = tuple(held_back)
        self._own = compiled.first.copy()
        self._mask = self._own
        self._index = 0
        self._ended = False
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._hold_back()

    @property
    def is_slow(self) -> bool:
        """Whether masks of this constraint take so long that no step should wait for one."""
        return self._compiled.is_slow

    @property
    def failure(self) -> str | None:
        """Why the answer cannot go on; None: it can."""
        return self._failure

    def is_ready(self, index: int) -> bool:
        """Whether `mask(index)` returns at once."""
        return self._index == index or self._ended or self._failure is not None

    def begin_after(self, tokens: Sequence[int]) -> bool:
        """Go to the state after these tokens, with which the answer began elsewhere. Return False if they do not follow
        the constraint. Called once, before all else."""
        if not tokens:
            return True
        if self._matcher.try_consume_tokens(list(tokens)) < len(tokens):
            return False
        self._fill(len(tokens))
        return self._failure is None

    def push(self, token: int) -> None:
        """Add the answer's next token, and compute the mask of the one after it. Never raises."""
        if self._ended or self._failure is not None:
            return
        if not self._matcher.consume_token(token):
            self.fail(f"token {token} does not follow the constraint: {_said(self._matcher)}")
            return
        self._fill(self._index + 1)

    def mask(self, index: int) -> Mask | None:
        """Return the tokens that may be at this output index; it is valid until the next `push`.

        None: any token, because the answer has ended or failed.
        """
        with self._changed:
            if not self.is_ready(index):
                begun_s = time.perf_counter()
                if not self._changed.wait_for(lambda: self.is_ready(index), WAIT_S):
                    self._failure = f"the mask of the next token took more than {WAIT_S:g} s"
                self._compiled.times.waited(time.perf_counter() - begun_s)
            return None if self._ended or self._failure is not None else self._mask

    def end(self) -> None:
        """Compute no more masks, and let nobody wait for one."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Note that the answer cannot go on."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def fork(self) -> AllowedTokens:
        """Return an independent state at the same place. No `push` may run meanwhile."""
        other = AllowedTokens(self._compiled, self._held_back)
        other._matcher = self._matcher.deep_copy()
        other._own[:] = self._own
        other._index, other._failure = self._index, self._failure
        other._hold_back()
        return other

    def _fill(self, index: int) -> None:
        start_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._own.ctypes.data, self._own.nbytes)
        elapsed_s = time.thread_time() - start_s
        self._compiled.times.computed(elapsed_s)
        if elapsed_s > SLOW_S:
            self._compiled.is_slow = True
        if self._matcher.is_error():
            self.fail(f"the constraint is too complex at this place: {_said(self._matcher)}")
            return
        with self._changed:
            self._index = index
            self._hold_back()
            self._changed.notify_all()

    def _hold_back(self) -> None:
        self._mask = self._own
        for rule in self._held_back:
            if self._index < rule.until and (rest := self._mask & rule.others).any():
                self._mask = rest


def _said(matcher: LLMatcher) -> str:
    """Return the first line of the library's error."""
    return matcher.get_error().strip().partition("\n")[0][:300]
