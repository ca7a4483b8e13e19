"""In which order a stream's batches count, and what a missing one means: gaps, replays, restarts. Pure.

An engine numbers its batches from 0 and keeps the last ones (vLLM: 10,000) to send again. A replay always begins with
the last batch that was applied: if it comes back as it was, the engine is the one that was heard before, else it is
another life, of which nothing is known. So one question finds a lost tail, a gap and a restart alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

MAX_HELD = 20_000
MAX_HELD_BYTES = 64 * 2**20
"""Batches kept while a replay runs. Of more, none is kept, and the replay is asked for once more."""


@dataclass(slots=True)
class OrderCounts:
    """Since the start."""

    gaps: int = 0
    """Times that a batch was missing."""
    restarts: int = 0
    """Times that the stream began anew."""
    lost: int = 0
    """Times that what was missing could not be had, and all that the engine holds was forgotten."""


class Order:
    """Puts the batches of one publisher in order. Calls `apply` with each payload, in sequence; `forget` before the
    first one that does not follow; `ask` to have batches from a number on replayed (only with `has_replay`).
    """

    def __init__(
        self,
        *,
        has_replay: bool,
        apply: Callable[[bytes], None],
        forget: Callable[[], None],
        ask: Callable[[int], None],
    ) -> None:
        self._has_replay = has_replay
        self._apply = apply
        self._forget = forget
        self._ask = ask
        self.counts = OrderCounts()
        self.next: int | None = None
        """Number of the batch that follows; None before the first."""
        self.is_synced = False
        """Whether what was published before has been asked for, as far as it can be."""
        self.is_replaying = False
        self._last = 0
        """Digest of batch `next - 1`."""
        self._awaits_last = False
        """The replay's first answer is to be batch `next - 1`."""
        self._is_void = False
        """What else the replay brings does not count."""
        self._stuck_at: int | None = None
        """The number that a replay has just failed to bring."""
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._has_dropped = False

    def check(self) -> None:
        """Ask whether anything is missing, and whether the engine is still the same. After (re)connecting, and now and
        then."""
        if not self._has_replay:
            self.is_synced = True
        elif not self.is_replaying:
            self.is_replaying = True
            self._is_void = False
            self._awaits_last = bool(self.next)
            self._ask(self.next - 1 if self.next else 0)

    def live(self, seq: int, payload: bytes) -> None:
        """A batch as it was published."""
        if self.is_replaying or (self._has_replay and not self.is_synced):
            self._hold(seq, payload)
        elif self.next is None or seq == self.next:
            self._take(seq, payload)
        elif seq > self.next:
            self.counts.gaps += 1
            if self._has_replay and self._stuck_at != self.next:
                self._stuck_at = self.next
                self._hold(seq, payload)
                self.check()
            else:
                self._lose(seq, payload)
        elif not self._has_replay:
            self.counts.restarts += 1
            self._lose(seq, payload, is_restart=True)
        elif seq == 0:  # a restart; any other one was replayed before it came
            self.check()

    def replayed(self, seq: int, payload: bytes) -> None:
        """A batch that was asked for."""
        if not self.is_replaying or self._is_void:
            return
        if self._awaits_last:
            self._awaits_last = False
            assert self.next is not None
            if seq == self.next - 1 and xxh3_64_intdigest(payload) == self._last:
                return
            if seq < self.next:
                self._begin_anew()
                return
            self._lose(seq, payload)
        elif self.next is None or seq == self.next:
            self._take(seq, payload)
        elif seq > self.next:
            self._lose(seq, payload)

    def replay_ended(self) -> None:
        """All that was asked for has come."""
        if not self.is_replaying:
            return
        self.is_replaying = False
        if self._awaits_last:  # it has published less than was heard of it: another life
            self._awaits_last = False
            self._begin_anew()
        if self._is_void or self._has_dropped:
            self._has_dropped = False
            self.check()
            return
        if self.next is None:
            self.next = 0
        self.is_synced = True
        self._release()

    def replay_failed(self) -> None:
        """No answer: what is missing is lost."""
        if not self.is_replaying:
            return
        self.is_replaying = self._awaits_last = self._has_dropped = False
        self.is_synced = True
        self._stuck_at = self.next
        self._release()

    def restart(self) -> None:
        """Forget everything, as of a publisher that was never heard."""
        self.next = None
        self.is_synced = self.is_replaying = self._awaits_last = self._has_dropped = False
        self._held.clear()
        self._held_bytes = 0
        self._forget()

    def _begin_anew(self) -> None:
        self.counts.restarts += 1
        self._forget()
        self.next = None
        self._is_void = True

    def _lose(self, seq: int, payload: bytes, *, is_restart: bool = False) -> None:
        if not is_restart:
            self.counts.lost += 1
        self._forget()
        self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> None:
        self.next = seq + 1
        self._last = xxh3_64_intdigest(payload)
        self._apply(payload)

    def _hold(self, seq: int, payload: bytes) -> None:
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        if len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
            self._held.clear()
            self._held_bytes = 0
            self._has_dropped = True

    def _release(self) -> None:
        held, self._held, self._held_bytes = self._held, deque(), 0
        for seq, payload in held:
            if self.next is not None and seq < self.next and self._has_replay and not self.is_replaying:
                continue  # it was replayed
            self.live(seq, payload)
