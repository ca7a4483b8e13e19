"""Which LoRA adapters a pod has loaded, and the cost of a request for another adapter. Pure.

An engine holds a few adapters at once (vLLM: `--max-loras`). It loads a new adapter in place of the least recently used
one. Its metrics name the adapters of running and waiting requests. If all places are in use, a request for a new
adapter waits until all requests of one loaded adapter have ended.
"""

from __future__ import annotations

from collections.abc import Set

LOAD_S = 0.1
"""Seconds to load an adapter: some 100 MB from the host's memory or page cache, for rank 16 to 64 and a model of 8 to
70 billion parameters. A prior, until answers show the time (`AdapterLoads`)."""
MOST_LOAD_S = 2.0
"""Longest believed time to load: an answer that stalled for another reason must not keep requests away from the pool's
other pods."""
_ANSWERS = 20
"""About this many answers count, the prior as one of them."""
HELD_S = 1.0
"""Seconds of waiting for a place if all are in use: about an answer of 50 to 100 tokens. A prior."""
NONE: frozenset[str] = frozenset()


class AdapterLoads:
    """The time that pods of one kind take to load an adapter: the mean delay of first tokens beyond the prefill, over
    requests that had to load an adapter and had a place for it."""

    __slots__ = ("_count", "seconds")

    def __init__(self) -> None:
        self.seconds = LOAD_S
        self._count = 1

    def observe(self, late_s: float) -> None:
        """Count a first token that came `late_s` seconds later than without loading; below 0 counts as 0."""
        self._count = min(self._count + 1, _ANSWERS)
        self.seconds += (min(max(late_s, 0.0), MOST_LOAD_S) - self.seconds) / self._count


class Adapters:
    """The adapters of one pod."""

    __slots__ = ("_loaded", "_most", "_running")

    def __init__(self) -> None:
        self._loaded: dict[str, None] = {}
        """Least recently used first; at most `_most`."""
        self._most = 0
        """Adapters that the pod holds at once; 0: unknown, or none."""
        self._running: Set[str] = NONE

    @property
    def loaded(self) -> tuple[str, ...] | None:
        """Return the adapters believed to be loaded, least recently used first; None: unknown."""
        return tuple(self._loaded) if self._most else None

    def seen(self, most: int, running: Set[str], waiting: Set[str]) -> None:
        """Take the adapters of running and waiting requests, and how many the pod holds, as the pod reported."""
        self._most = most
        self._running = running
        for name in (*sorted(waiting - running), *sorted(running)):
            self.used(name)

    def used(self, adapter: str) -> None:
        """Note that a request for the adapter goes to the pod."""
        if not self._most:
            return
        self._loaded.pop(adapter, None)
        self._loaded[adapter] = None
        while len(self._loaded) > self._most:
            del self._loaded[next(iter(self._loaded))]

    def loads(self, adapter: str) -> bool:
        """Whether a request for the adapter would load it into a place that no request uses."""
        return bool(self._most) and adapter not in self._loaded and len(self._running) < self._most

    def setup_s(self, adapter: str, load_s: float = LOAD_S) -> float:
        """Return the seconds that a request waits for its adapter; 0 if nothing is known. `load_s`: time to load."""
        if not self._most or adapter in self._loaded:
            return 0.0
        is_full = len(self._running) >= self._most
        return load_s + HELD_S if is_full else load_s
