"""The order in which a stream's batches are applied, and what a missing one means: a gap, a replay or a restart. Pure.

An engine numbers its batches from 0 and keeps the last ones (vLLM: 10,000) to send again. A replay always begins with
the last batch that was applied. If the same batch comes back, the engine is the same. Otherwise it has restarted, and
nothing is known of it. So one replay request detects lost last batches, a gap and a restart alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from engine.contract.sequence import Step, step

MAX_HELD = 20_000
MAX_HELD_BYTES = 64 * 2**20
"""Batches kept while a replay runs. If there are more, none is kept, and the replay is requested again."""


@dataclass(slots=True)
class OrderCounts:
    """Counts since the start."""

    gaps: int = 0
    """Times that a batch was missing."""
    restarts: int = 0
    """Times that the stream began anew."""
    lost: int = 0
    """Times that missing batches could not be replayed, so that all that the engine holds was forgotten."""


class Order:
    """Puts the batches of one publisher in order. Calls `apply` with each payload, in sequence. Calls `forget` before
    the first batch that does not follow, and `ask` to replay batches from a number on (only with `has_replay`).
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
        """Number of the next batch; None before the first."""
        self.is_synced = False
        """Whether earlier batches have been replayed, as far as possible."""
        self.is_replaying = False
        self._last = 0
        """Digest of batch `next - 1`."""
        self._awaits_last = False
        """Whether the replay should begin with batch `next - 1`."""
        self._is_void = False
        """Whether the rest of the replay is ignored."""
        self._stuck_at: int | None = None
        """Number of the missing batch that was last asked for: if it is still missing, it is not asked for again."""
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._has_dropped = False

    def connected(self) -> None:
        """Note a new connection, which ends any running replay. Call this before the first batch that comes through it.

        The engine may be another one. A batch with the next number does not show that the engine is the same: another
        engine may have published as many batches. So no batch is applied before a replay was asked for and answered.
        """
        self._held.clear()
        self._held_bytes = 0
        self.is_synced = self.is_replaying = self._has_dropped = False
        self.check()

    def check(self) -> None:
        """Ask whether anything is missing, and whether the engine is still the same. Call this regularly."""
        if not self._has_replay:
            self.is_synced = True
        elif not self.is_replaying:
            self.is_replaying = True
            self._is_void = False
            self._awaits_last = bool(self.next)
            self._ask(self.next - 1 if self.next else 0)

    def live(self, seq: int, payload: bytes) -> None:
        """Take a batch as it was published."""
        if self.is_replaying or (self._has_replay and not self.is_synced):
            self._hold(seq, payload)
        elif self.next is None or (found := step(self.next - 1, seq)) is Step.NEXT:
            self._take(seq, payload)
        elif found is Step.GAP:
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
        elif seq == 0:  # a restart; other old batches were replayed already
            self.check()

    def replayed(self, seq: int, payload: bytes) -> None:
        """Take a batch that was requested."""
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
        """Note that all requested batches have come."""
        if not self.is_replaying:
            return
        self.is_replaying = False
        if self._awaits_last:  # the engine has published less than was heard before: it restarted
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
        """Note that no answer came: what is missing is lost. After a new connection, the engine may be another one."""
        if not self.is_replaying:
            return
        if self._awaits_last and not self.is_synced:
            self.counts.lost += 1
            self._forget()
            self.next = None
        self.is_replaying = self._awaits_last = self._has_dropped = False
        self.is_synced = True
        self._stuck_at = self.next
        self._release()

    def restart(self) -> None:
        """Forget everything, as if the publisher had never been heard."""
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
