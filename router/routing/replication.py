"""When to compute another copy of a prefix: once requests have lost as much by waiting as the copy costs.

A single request loses less by waiting for a pod that holds its prefix than by computing another copy, though all later
requests would profit from the copy. So what requests lose by waiting is booked as owed to the prefix. Once that and
what the current request would save reach the price of a copy, a copy is made. This is the rule of ski rental (Karlin,
Manasse, Rudolph and Sleator, Competitive snoopy caching, 1988): paying when the losses reach the price costs at most
twice what perfect foresight would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.contract.keys import PrefixKey
from router.routing.terms import Estimate
from router.views.table import CandidatePods, Floats, largest, smallest
from router.views.types import RequestInfo

_HALF_LIFE_S = 10.0
"""Half-life of what is owed: old traffic does not justify a copy."""
_PREFIXES = 4096
_NEARBY_STRIDES = 4
"""Matches that differ by less than this many strides count as one prefix: their lengths are estimates in tokens."""


class Ledger:
    """The seconds owed to each prefix, which halve every `_HALF_LIFE_S`. Only the prefixes used last are kept."""

    def __init__(self) -> None:
        self._owed: dict[PrefixKey, tuple[float, float, int]] = {}
        """Key -> (seconds, time of booking, pods that lacked the prefix then), least recently used first."""

    def prefix(self, request: RequestInfo, longest_match: int) -> PrefixKey | None:
        """Return the key under which the longest match of a request is booked; None if nothing matches."""
        keys = request.keys
        strides = min(math.ceil(longest_match * len(keys) / request.prompt_tokens), len(keys))
        return self.booked_under(keys, strides)

    def booked_under(self, keys: Sequence[PrefixKey], strides: int) -> PrefixKey | None:
        """Return the key under which the first `strides` of `keys` are booked; None for no strides."""
        for key in reversed(keys[max(0, strides - _NEARBY_STRIDES) : strides]):
            if key in self._owed:
                return key
        return keys[strides - 1] if strides else None

    def owed_s(self, key: PrefixKey, now_s: float, lacking: int | None = None) -> float:
        """Return the decayed seconds booked under `key`. `lacking`: pods that lack the prefix now; None: no other
        gateway makes copies. If fewer pods lack it than at the booking, another gateway's copy has paid what is
        owed."""
        seconds, at_s, lacked = self._owed.get(key, (0.0, now_s, 0))
        if lacking is not None and lacking < lacked:
            return 0.0
        return seconds * math.exp2((at_s - now_s) / _HALF_LIFE_S)

    def book(self, key: PrefixKey, owed_s: float, now_s: float, lacking: int = 0) -> None:
        """Set the seconds owed under `key`. `lacking`: pods that lack the prefix."""
        self._owed.pop(key, None)
        if owed_s > 0:
            self._owed[key] = (owed_s, now_s, lacking)
            if len(self._owed) > _PREFIXES:
                del self._owed[next(iter(self._owed))]


def pods_lacking(request: RequestInfo, pods: CandidatePods) -> int | None:
    """Return how many pods hold less than the longest match; None if no other gateway tells of its copies."""
    if request.partition is None or not request.partition.is_synced:
        return None
    return 0 if pods.matched is None else int(np.count_nonzero(pods.matched < pods.longest))


def owed_after(at: Estimate, scores: Floats, chosen: int) -> float:
    """Return what is owed after this request. A copy pays it. It grows by what one more copy, on an average other pod,
    would have saved the request, or by 0 if that pod would have been no better.

    Other gateways' losses are not known here. This gateway's requests are `RequestInfo.share` of all, and stand for the
    rest.
    """
    lacking, duplicate_s, credit_s = at.lacking, at.duplicate_s, at.credit_s
    if duplicate_s is None:
        return 0.0
    owed_s, best_s = at.owed_s, float(scores[chosen])
    if duplicate_s[chosen]:
        paid_s = 0.0 if credit_s is None else float(credit_s[chosen])
        # The request itself pays what it saves by not waiting for a pod that holds a copy.
        holding_s = smallest(scores[duplicate_s == 0])
        owed_s -= min(paid_s, max(0.0, best_s + paid_s - holding_s))
        best_s = holding_s
    with_copy_s = (scores if credit_s is None else scores + credit_s) - duplicate_s
    saved_s = math.fsum(np.maximum(best_s - with_copy_s[lacking], 0.0).tolist()) / len(lacking)
    return min(owed_s + saved_s / at.request.share, largest(duplicate_s))
