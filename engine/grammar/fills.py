"""Computes masks on threads of their own, while the device computes the step that needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.grammar.allowed import AllowedTokens

MAX_THREADS = 4
"""The library releases the interpreter lock while it computes a mask: 20 to 200 us."""


class MaskFills:
    """A pool of threads. Methods are called on the event loop."""

    def __init__(self, wake: Callable[[], None], threads: int | None = None) -> None:
        """`wake`: called on a thread when a mask is ready for which a request waited outside of the steps."""
        self._wake = wake
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="masks")

    def begin(self, pushed: Sequence[tuple[AllowedTokens, int]]) -> None:
        """Add the token to each of the answers, and return at once."""
        slow = [one for one in pushed if one[0].is_slow]
        quick = [one for one in pushed if not one[0].is_slow] if slow else pushed
        for first in range(min(self._threads, len(quick))):
            self._pool.submit(self._push, quick[first :: self._threads])
        for one in slow:
            self._pool.submit(self._push, (one,))

    def close(self) -> None:
        """Begin no more masks."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _push(self, pushed: Sequence[tuple[AllowedTokens, int]]) -> None:
        waited_for = False
        for allowed, token in pushed:
            allowed.push(token)
            waited_for |= allowed.is_slow
        if waited_for:
            self._wake()
