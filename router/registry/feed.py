"""One pod's place in the registry's messages: whether the next message follows, and what to do if it does not.

Pure: messages and times in, verdicts out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.contract.events import RegistryMessage


class Verdict(Enum):
    """What to do with a delta."""

    APPLY = "apply"
    SKIP = "skip"
    """Already contained in what was loaded."""
    RESYNC = "resync"
    """There is a gap, or the engine has restarted: load its snapshot."""


@dataclass(slots=True)
class PodFeed:
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
    complaint: str | None = None
    """The last fault of the pod's messages."""
    complained_at_s: float = 0.0

    def judge(self, delta: RegistryMessage) -> Verdict:
        """Return whether `delta` follows what was applied. Changes nothing."""
        if not self.synced or delta.epoch != self.epoch:
            return Verdict.RESYNC
        if delta.seq <= self.seq:
            return Verdict.SKIP
        return Verdict.APPLY if delta.seq == self.seq + 1 else Verdict.RESYNC

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

    def complain(self, text: str, now_s: float, remembered_s: float) -> bool:
        """Note a fault of the pod's messages. False: the same fault was noted less than `remembered_s` ago."""
        is_known = text == self.complaint and now_s - self.complained_at_s < remembered_s
        self.complaint, self.complained_at_s = text, now_s
        return not is_known

    def lost(self) -> None:
        """Note that a message is missing: no delta is applied until a snapshot is."""
        self.synced = False

    def is_expired(self, now_s: float, lease_s: float) -> bool:
        """Return whether the pod has been silent for longer than its lease."""
        return self.ever_synced and now_s - self.heard_at_s > lease_s
