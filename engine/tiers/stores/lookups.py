"""Look-ups of which blocks of a prompt the shared tier holds. Separate threads ask the file system."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

THREADS = 2
MAX_ASKED = 64
"""Most look-ups at a time: if a file system hangs, no more is asked of it."""


class Lookup(Protocol):
    """A look-up that was begun."""

    def found(self) -> int | None:
        """Return how many leading blocks are there; None: not known yet. Never waits."""
        ...

    def cancel(self) -> None:
        """Note that no request waits for it any more."""
        ...


class Lookups(Protocol):
    """Begins look-ups. No method waits."""

    def ask(self, digests: Sequence[bytes], parent: bytes) -> Lookup | None:
        """Look up how many of these blocks of one chain, from the first on, are there; `parent`: digest before the
        first block. Return None if no look-up can begin now."""
        ...


class TellingLookups(Lookups, Protocol):
    """Lookups that report their answers."""

    def tell(self, on_end: Callable[[], None] | None) -> None: ...


class ThreadedLookups:
    """Lookups by a function that may take any time."""

    def __init__(self, leading: Callable[[Sequence[bytes], bytes], int], may_ask: Callable[[], bool]) -> None:
        """`leading`: see `SharedFolder.leading`, may raise OSError; `may_ask`: False while answers may be wrong."""
        self._leading, self._may_ask = leading, may_ask
        self._on_end: Callable[[], None] | None = None
        self._queue: SimpleQueue[_Asked | None] = SimpleQueue()
        self._open = 0
        self._lock = threading.Lock()
        for number in range(THREADS):
            threading.Thread(target=self._work, name=f"shared-tier-lookup-{number}", daemon=True).start()

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """Call `on_end` on a thread of the lookups whenever one is answered; None: call nothing."""
        self._on_end = on_end

    def ask(self, digests: Sequence[bytes], parent: bytes) -> Lookup | None:
        """See `Lookups.ask`."""
        with self._lock:
            if self._open >= MAX_ASKED or not self._may_ask():
                return None
            self._open += 1
        asked = _Asked(digests, parent, Future())
        self._queue.put(asked)
        return asked

    def close(self) -> None:
        """Answer nothing more, without waiting."""
        self._on_end = None
        for _ in range(THREADS):
            self._queue.put(None)

    def _work(self) -> None:
        while (asked := self._queue.get()) is not None:
            found = 0
            if not asked.is_cancelled:
                try:
                    found = self._leading(asked.digests, asked.parent)
                except OSError:  # nothing is known to be there
                    found = 0
            with self._lock:
                self._open -= 1
            asked.answer.set_result(found if self._may_ask() else 0)
            if (on_end := self._on_end) is not None:
                on_end()


@dataclass(slots=True, eq=False)
class _Asked:
    digests: Sequence[bytes]
    parent: bytes
    answer: Future[int]
    is_cancelled: bool = False

    def found(self) -> int | None:
        """See `Lookup.found`."""
        return self.answer.result() if self.answer.done() else None

    def cancel(self) -> None:
        """See `Lookup.cancel`."""
        self.is_cancelled = True
