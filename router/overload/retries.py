"""How many further attempts may run at a time, so that failing pods do not get several times as many requests."""

from __future__ import annotations

RETRY_SHARE = 0.2
MIN_RETRIES = 10
"""This share of the requests in flight may be retries (as in Linkerd and Envoy), but at least this many (Linkerd)."""


class RetryBudget:
    """Counts further attempts under way, up to their first byte: these add to the pods' work."""

    __slots__ = ("under_way",)

    def __init__(self) -> None:
        self.under_way = 0

    def take(self, in_flight: int) -> bool:
        """Begin one more attempt, which counts until `give_back`. `in_flight`: all requests. False: not allowed."""
        if self.under_way >= max(MIN_RETRIES, RETRY_SHARE * in_flight):
            return False
        self.under_way += 1
        return True

    def give_back(self) -> None:
        """Note that an attempt has its first byte, or has failed."""
        self.under_way -= 1
