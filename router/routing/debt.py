"""The ledger of what requests lost because too few pods hold a prefix. It decides when to copy the prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.contract.keys import PrefixKey

_HALF_LIFE_S = 10.0
"""Half-life of a debt: old traffic does not justify a copy."""
_ACCOUNTS = 4096
_NEARBY_STRIDES = 4
"""Matches that differ by less than this many strides count as one prefix: their lengths are estimates in tokens."""


class Debts:
    """The seconds lost for each prefix, which halve every `_HALF_LIFE_S`. Only the prefixes used last are kept."""

    def __init__(self) -> None:
        self._accounts: dict[PrefixKey, tuple[float, float, int]] = {}
        """Key -> (seconds, time of booking, pods that lacked the prefix then), least recently used first."""

    def account(self, keys: Sequence[PrefixKey], strides: int) -> PrefixKey | None:
        """Return the key under which the first `strides` of `keys` are booked; None for no strides."""
        for key in reversed(keys[max(0, strides - _NEARBY_STRIDES) : strides]):
            if key in self._accounts:
                return key
        return keys[strides - 1] if strides else None

    def owed_s(self, key: PrefixKey, now_s: float, lacking: int | None = None) -> float:
        """Return the decayed seconds booked under `key`. `lacking`: pods that lack the prefix now; None: no other
        gateway makes copies. If fewer pods lack it than at the booking, another gateway's copy has paid the debt."""
        seconds, at_s, lacked = self._accounts.get(key, (0.0, now_s, 0))
        if lacking is not None and lacking < lacked:
            return 0.0
        return seconds * math.exp2((at_s - now_s) / _HALF_LIFE_S)

    def book(self, key: PrefixKey, owed_s: float, now_s: float, lacking: int = 0) -> None:
        """Set the seconds owed under `key`. `lacking`: pods that lack the prefix."""
        self._accounts.pop(key, None)
        if owed_s > 0:
            self._accounts[key] = (owed_s, now_s, lacking)
            if len(self._accounts) > _ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
