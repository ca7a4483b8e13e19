"""When a gateway tells the others what it did: where requests went at once, the rest in batches. Pure.

A pod looks idle to the others until they hear of the prompt that it was just sent. So how late they hear of that costs
time to first token (`router/routing/README.md`), and how late they hear of first tokens and ends costs none that can be
seen.
"""

from __future__ import annotations

import math

REST_S = 0.05
"""Between two messages of a gateway, among few gateways, of which the second tells of no request's way."""
FEW_GATEWAYS = 10
"""Beyond, that time widens with the square root of their number, as engines' does with theirs."""
ROUTED_S = 0.005
"""Between two messages of all gateways together that tell where requests went, on average: 200 a second, each of which
costs every gateway some 0.2 ms to read."""
BURST = 8
"""Such messages of a gateway that may come together, beyond that average: mostly a request's way is told at once."""
LINGER_S = 0.005
"""What comes first after a quiet time waits for so long for what comes with it; but the way of a request does not."""


def rest_s(gateways: int) -> float:
    """Between two messages of a gateway, of which the second tells of no request's way. `gateways`: this one too."""
    return REST_S * math.sqrt(max(1.0, gateways / FEW_GATEWAYS))


def routed_s(gateways: int) -> float:
    """Between two messages of a gateway that tell where requests went, on average; at most `rest_s`."""
    return min(rest_s(gateways), ROUTED_S * gateways)


class Pace:
    """Of one gateway. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._sent_at_s = -math.inf
        self._paid_until_s = -math.inf
        """When as much time has passed as the messages with requests' ways take on average: a token bucket."""

    def sent(self, now_s: float, gateways: int, *, tells_ways: bool) -> None:
        """A message was sent; whether it told where requests went."""
        self._sent_at_s = now_s
        if tells_ways:
            self._paid_until_s = max(self._paid_until_s, now_s) + routed_s(gateways)

    def due_s(self, oldest_s: float | None, oldest_routed_s: float | None, gateways: int) -> float:
        """When the next message is to be sent; infinite while there is nothing to tell.

        `oldest_s`, `oldest_routed_s`: when what is to be told came first, and the first request of which the way is to
        be told; None: there is none.
        """
        due = math.inf
        if oldest_s is not None:
            due = max(oldest_s + LINGER_S, self._sent_at_s + rest_s(gateways))
        if oldest_routed_s is not None:
            due = min(due, max(oldest_routed_s, self._paid_until_s - BURST * routed_s(gateways)))
        return due
