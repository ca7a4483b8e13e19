"""One pod's place in the registry's messages: whether the next message follows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.events import RegistryMessage
from engine.contract.sequence import Step, step


@dataclass(slots=True)
class PodCursor:
    """One pod's place in the registry. `heard_at_s` is the monotonic time of its last message."""

    model: str
    epoch: int | None = None
    seq: int = 0
    synced: bool = False
    ever_synced: bool = False
    looked: bool = False
    """Whether a snapshot was looked for at least once, found or not."""
    heard_at_s: float = 0.0
    retry_at_s: float = 0.0
    is_unreadable: bool = False
    """Whether the last message had a version that is not known here."""
    left_epoch: int | None = None
    """The epoch before the present one. If messages of it still come, a second engine uses the same id."""

    def judge(self, delta: RegistryMessage) -> Step:
        """Return whether `delta` follows what was applied. After a gap, and after a restart of the engine, its snapshot
        has to be loaded. Changes nothing."""
        if not self.synced or delta.epoch != self.epoch:
            return Step.GAP
        return step(self.seq, delta.seq)

    def applied(self, message: RegistryMessage, now_s: float) -> None:
        """Note that the message, a snapshot or the next delta, is in the index."""
        self.epoch, self.seq = message.epoch, message.seq
        self.synced = self.ever_synced = True
        self.is_unreadable = False
        self.heard_at_s = now_s

    def began_anew(self) -> None:
        """Note that the engine has restarted: what is known is from before."""
        self.left_epoch = self.epoch
        self.lost()

    def became_unreadable(self) -> None:
        """Note that the engine sends a version that is not known here: it counts as one that publishes nothing."""
        self.epoch, self.seq = None, 0
        self.synced = self.ever_synced = False
        self.is_unreadable = self.looked = True

    def lost(self) -> None:
        """Note that a message is missing: no delta is applied until a snapshot is."""
        self.synced = False

    def is_expired(self, now_s: float, lease_s: float) -> bool:
        """Return whether the pod has been silent for longer than its lease."""
        return self.ever_synced and now_s - self.heard_at_s > lease_s
