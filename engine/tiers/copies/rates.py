"""The rate of copying, measured on the copies themselves."""

from __future__ import annotations


class CopyRate:
    """Bytes per second of one direction: a sum of bytes over a sum of seconds, both decaying with the bytes moved.

    In a ratio of sums a large copy counts for more than a small one. After `half_life_bytes` more, a copy counts half.
    """

    def __init__(self, half_life_bytes: float) -> None:
        self._half_life_bytes = half_life_bytes
        self._bytes = 0.0
        self._seconds = 0.0

    def observe(self, moved_bytes: int, elapsed_s: float) -> None:
        """Add a copy of this many bytes and seconds. Times that are not positive are ignored."""
        if elapsed_s <= 0 or moved_bytes <= 0:
            return
        keep = 0.5 ** (moved_bytes / self._half_life_bytes)
        self._bytes = self._bytes * keep + moved_bytes
        self._seconds = self._seconds * keep + elapsed_s

    def bytes_per_s(self, open_bytes: int = 0, open_s: float = 0.0) -> float | None:
        """Return the rate, None before the first copy.

        `open_bytes`, `open_s`: the bytes of a running copy and its seconds so far. If the copy takes longer than the
        rate predicts, it counts as if it ended now, so a stalled copy is noticed before its end.
        """
        if not self._seconds:
            return None
        rate = self._bytes / self._seconds
        if open_bytes and open_s > open_bytes / rate:
            return (self._bytes + open_bytes) / (self._seconds + open_s)
        return rate
