"""When a gateway tells the others what it did, and when it reads what they tell. Pure.

It tells at once where a request went, and the rest in batches. A pod looks idle to the other gateways until they hear
of the prompt that it was just sent. This delay costs time to first token (`router/DECISIONS.md`). Late news of
first tokens and ends costs less, and only near saturation. So these are told early only if few messages are sent.
"""

from __future__ import annotations

import math

REST_S = 0.05
"""Longest time between two messages of a gateway if the second has no Routed event. Such a message waits this long if
Routed events use up the rate at which the gateway may send."""
FEW_GATEWAYS = 10
"""With more gateways, `REST_S` grows with the square root of their number, as the period of engines' reports does with
the number of engines."""
ROUTED_S = 0.0025
"""Mean time between two messages with Routed events, over all gateways together: 400 a second. Each costs every gateway
some 0.2 ms to read. With 200 a second, four gateways heard of requests 9 ms late at 307 requests a second."""
BURST = 8
"""How many such messages of a gateway, and how many reads, may come in a burst, beyond the average. So most requests
are told, and read, without delay."""
LINGER_S = 0.001
"""An engine's step brings several first tokens and ends at once: the first of these events waits this long for the
others of its step. A Routed event does not wait."""
READ_S = 0.0025
"""Least mean time between two reads of a gateway. Messages are left to gather in between, because a read costs as much
as the work on several messages."""
FEW_READERS = 4
"""With more gateways, `READ_S` grows with their number: together they read 1,600 times a second at most, which takes
some 3 % of a core of Redis."""


def rest_s(gateways: int) -> float:
    """Return the seconds between two messages of a gateway if the second has no Routed event. `gateways`: this
    one included."""
    return REST_S * math.sqrt(max(1.0, gateways / FEW_GATEWAYS))


def routed_s(gateways: int) -> float:
    """Return the mean seconds between two messages of a gateway with Routed events; at most `rest_s`."""
    return min(rest_s(gateways), ROUTED_S * gateways)


class Pace:
    """The pace of one gateway's messages. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._sent_at_s = -math.inf
        self._paid_until_s = -math.inf
        """A token bucket: the time up to which the messages sent so far are paid for, at `routed_s` each. Messages with
        Routed events and early messages pay. Messages without Routed events leave half of the bucket to the others."""

    def sent(self, now_s: float, gateways: int, *, has_routed: bool) -> None:
        """Note that a message was sent. `has_routed`: whether it had Routed events."""
        is_early = now_s < self._sent_at_s + rest_s(gateways)
        self._sent_at_s = now_s
        if has_routed or is_early:
            self._paid_until_s = max(self._paid_until_s, now_s) + routed_s(gateways)

    def due_s(self, oldest_s: float | None, oldest_routed_s: float | None, gateways: int) -> float:
        """Return when to send the next message; infinite while there is nothing to tell.

        `oldest_s`: when the oldest event not yet told came. `oldest_routed_s`: the same for Routed events. None:
        there is none.
        """
        due = math.inf
        if oldest_s is not None:
            spare_s = self._paid_until_s - BURST / 2 * routed_s(gateways)
            due = max(oldest_s + LINGER_S, min(self._sent_at_s + rest_s(gateways), spare_s))
        if oldest_routed_s is not None:
            due = min(due, max(oldest_routed_s, self._paid_until_s - BURST * routed_s(gateways)))
        return due


def read_s(gateways: int) -> float:
    """Return the mean seconds between two reads of a gateway."""
    return READ_S * max(1.0, gateways / FEW_READERS)


class ReadPace:
    """The pace of one gateway's reading. If a pause followed every read, messages would wait even at low rates: at
    125 requests a second, the wait was 0.9 ms of the 2.3 ms that a message took (`loadgen/simulate/peer_stream.py`)."""

    def __init__(self) -> None:
        self._paid_until_s = -math.inf
        """A token bucket: the time up to which the reads so far are paid for."""

    def pause_s(self, now_s: float, gateways: int) -> float:
        """Note a read, and return the seconds until the next one: at most `read_s`. `now_s`: on any one clock."""
        every_s = read_s(gateways)
        self._paid_until_s = min(max(self._paid_until_s, now_s) + every_s, now_s + (BURST + 1) * every_s)
        return max(0.0, self._paid_until_s - BURST * every_s - now_s)
