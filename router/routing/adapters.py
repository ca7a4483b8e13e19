"""Which LoRA adapters a pod has loaded, and what it costs to send a request for another one there. Pure.

An engine holds a few adapters at once (vLLM: `--max-loras`) and loads another in place of the one that was unused for
longest; its metrics name those that requests run or wait with. A request whose adapter finds every place in use waits
until all requests of one of those adapters have ended.
"""

from __future__ import annotations

from collections.abc import Set

LOAD_S = 0.1
"""To load an adapter: some 100 MB from the host's memory or page cache, for one of rank 16 to 64 of a model of 8 to 70
billion parameters. Believed until answers tell (`AdapterLoads`)."""
MOST_LOAD_S = 2.0
"""More than this is not believed: one that stalled for another reason must not keep requests from all other pods."""
_ANSWERS = 20
"""About so many count, the prior as one of them."""
HELD_S = 1.0
"""To wait for a place, where others use all: about an answer of 50 to 100 tokens. A prior."""
NONE: frozenset[str] = frozenset()


class AdapterLoads:
    """How long pods that are alike take to load an adapter: what first tokens came later than a prefill explains, of
    requests that had to load one and had a place for it."""

    __slots__ = ("_count", "seconds")

    def __init__(self) -> None:
        self.seconds = LOAD_S
        self._count = 1

    def observe(self, late_s: float) -> None:
        """The first token of such a request came so many seconds later than without; below 0 counts as 0."""
        self._count = min(self._count + 1, _ANSWERS)
        self.seconds += (min(max(late_s, 0.0), MOST_LOAD_S) - self.seconds) / self._count


class Adapters:
    """The adapters of one pod."""

    __slots__ = ("_loaded", "_most", "_running")

    def __init__(self) -> None:
        self._loaded: dict[str, None] = {}
        """Longest unused first; at most `_most`."""
        self._most = 0
        """Adapters that it holds at once; 0: it does not tell, or has none."""
        self._running: Set[str] = NONE

    @property
    def loaded(self) -> tuple[str, ...] | None:
        """Those believed to be loaded, the longest unused first; None: the pod does not tell."""
        return tuple(self._loaded) if self._most else None

    def seen(self, most: int, running: Set[str], waiting: Set[str]) -> None:
        """The pod said which adapters requests run and wait with, and how many it holds."""
        self._most = most
        self._running = running
        for name in (*sorted(waiting - running), *sorted(running)):
            self.used(name)

    def used(self, adapter: str) -> None:
        """A request for the adapter goes to the pod."""
        if not self._most:
            return
        self._loaded.pop(adapter, None)
        self._loaded[adapter] = None
        while len(self._loaded) > self._most:
            del self._loaded[next(iter(self._loaded))]

    def loads(self, adapter: str) -> bool:
        """Whether a request for the adapter would have it loaded, into a place that no request uses."""
        return bool(self._most) and adapter not in self._loaded and len(self._running) < self._most

    def setup_s(self, adapter: str, load_s: float = LOAD_S) -> float:
        """Seconds that a request for the adapter waits for it here; 0 where nothing is known. `load_s`: to load one."""
        if not self._most or adapter in self._loaded:
            return 0.0
        is_full = len(self._running) >= self._most
        return load_s + HELD_S if is_full else load_s
