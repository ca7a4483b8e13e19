"""Detects prompts in a row that share one prefix."""

from __future__ import annotations

from engine.contract.keys import PrefixKey
from router.views.types import RequestInfo

MANY = 3
"""A run of fewer requests, the last one included, says nothing."""
_CHANCE = 0.01
"""Probability below which a run is not chance."""
_MOST = 0.5
"""Share of a prompt that has to be common."""


class Run:
    """The prefix that the last requests had in common, and how many there were."""

    __slots__ = ("_keys", "_length")

    def __init__(self) -> None:
        self._keys: tuple[PrefixKey, ...] = ()
        self._length = 0

    def common(self, request: RequestInfo) -> int:
        """Return how many keys the request shares with those before it; 0 if less than half of its prompt."""
        keys, own = self._keys, request.keys
        count = min(len(keys), len(own))
        if keys[:count] != own[:count]:
            count = next(i for i in range(count) if keys[i] != own[i])
        return count if count and count >= _MOST * len(own) else 0

    def is_all(self, common: int, share: float) -> bool:
        """Whether all requests now share the prefix of `common` keys: a run this long is not chance for a prefix with
        `share` of the traffic, 0 to 1."""
        in_a_row = self._length + 1
        return common > 0 and in_a_row >= MANY and (share >= 1 or share**in_a_row <= _CHANCE)

    def is_pair(self, common: int) -> bool:
        """Whether the request is the second with the prefix of `common` keys, and differs from the first prompt after
        that prefix. A conversation's next turn and a repeated prompt do not differ."""
        return self._length == 1 and 0 < common < len(self._keys)

    def add(self, request: RequestInfo, common: int) -> None:
        """Count the request, which has `common` keys in common with those before it."""
        self._length = self._length + 1 if common else 1
        self._keys = request.keys[: common or None]
