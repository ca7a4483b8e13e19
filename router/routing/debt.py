"""What it has cost so far that a prefix lies on too few pods: the ledger behind a decision to copy it to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.contract.keys import PrefixKey

_HALF_LIFE_S = 10.0
"""Traffic that has gone no longer argues for a copy."""
_ACCOUNTS = 4096
_NEARBY_STRIDES = 4
"""Matches of one shared prefix are estimated in tokens, so they come out a stride or so apart."""


class Debts:
    """Seconds lost by prefix; the accounts used last are kept, and each halves every `_HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._accounts: dict[PrefixKey, tuple[float, float]] = {}
        """Key -> (seconds, as of), longest unused first."""

    def account(self, keys: Sequence[PrefixKey], strides: int) -> PrefixKey | None:
        """The key under which the first `strides` of `keys` are booked; None for no strides."""
        for key in reversed(keys[max(0, strides - _NEARBY_STRIDES) : strides]):
            if key in self._accounts:
                return key
        return keys[strides - 1] if strides else None

    def owed_s(self, key: PrefixKey, now_s: float) -> float:
        """Seconds booked under `key`, decayed."""
        seconds, at_s = self._accounts.get(key, (0.0, now_s))
        return seconds * math.exp2((at_s - now_s) / _HALF_LIFE_S)

    def book(self, key: PrefixKey, owed_s: float, now_s: float) -> None:
        """Set what is owed under `key`."""
        self._accounts.pop(key, None)
        if owed_s > 0:
            self._accounts[key] = (owed_s, now_s)
            if len(self._accounts) > _ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
