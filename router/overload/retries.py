"""How many further attempts there may be at a time, so that failing pods are not asked several times as much."""

from __future__ import annotations

RETRY_SHARE = 0.2
MIN_RETRIES = 10
"""Of the requests in flight, as Linkerd's and Envoy's retry budgets have it; and so many in any case, as Linkerd's."""


class RetryBudget:
    """Further attempts under way, up to their first byte: those that add to what the pods have to do."""

    __slots__ = ("under_way",)

    def __init__(self) -> None:
        self.under_way = 0

    def take(self, in_flight: int) -> bool:
        """One more, which counts until `give_back`, beside so many requests in flight. False: it may not be."""
        if self.under_way >= max(MIN_RETRIES, RETRY_SHARE * in_flight):
            return False
        self.under_way += 1
        return True

    def give_back(self) -> None:
        """It has its first byte, or has failed."""
        self.under_way -= 1
