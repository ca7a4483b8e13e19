"""What copying costs, learnt from the copies themselves."""

from __future__ import annotations


class CopyRate:
    """Bytes per second of one direction: sums of bytes and of seconds, both forgotten exponentially by bytes moved.

    A ratio of sums, so a large copy counts for more than a small one, and `half_life_bytes` later for half as much.
    """

    def __init__(self, half_life_bytes: float) -> None:
        self._half_life_bytes = half_life_bytes
        self._bytes = 0.0
        self._seconds = 0.0

    def observe(self, moved_bytes: int, elapsed_s: float) -> None:
        """A copy of so many bytes took so long; times that are not positive say nothing and are left out."""
        if elapsed_s <= 0 or moved_bytes <= 0:
            return
        keep = 0.5 ** (moved_bytes / self._half_life_bytes)
        self._bytes = self._bytes * keep + moved_bytes
        self._seconds = self._seconds * keep + elapsed_s

    def bytes_per_s(self, open_bytes: int = 0, open_s: float = 0.0) -> float | None:
        """The rate; None before the first copy.

        `open_bytes`, `open_s`: a copy that runs and how long it has. Once it takes longer than the rate says, it counts
        as if it ended now, so that a copy which has stalled is noticed before its end.
        """
        if not self._seconds:
            return None
        rate = self._bytes / self._seconds
        if open_bytes and open_s > open_bytes / rate:
            return (self._bytes + open_bytes) / (self._seconds + open_s)
        return rate
