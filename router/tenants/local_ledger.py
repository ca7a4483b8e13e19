"""The ledger of one gateway alone: used without Redis, and while Redis is down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.tenants.ledger import SLOT_S, SLOTS, Grant, Report, Slot


@dataclass(slots=True)
class _Slot:
    number: int
    requests: int
    tokens: int


class _Window:
    """One tenant's use in the last SLOTS slots and the one that has begun."""

    def __init__(self) -> None:
        self.slots: deque[_Slot] = deque()

    def add(self, number: int, requests: int, tokens: int) -> None:
        while self.slots and self.slots[0].number <= number - SLOTS - 1:
            self.slots.popleft()
        if not requests and not tokens:
            return
        if not self.slots or self.slots[-1].number != number:
            self.slots.append(_Slot(number, 0, 0))
        self.slots[-1].requests += requests
        self.slots[-1].tokens += tokens


class LocalLedger:
    """Counts what this gateway has used. See Ledger."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def record(self, reports: Iterable[Report]) -> None:
        """Count what was used while another ledger decides."""
        number = int(self._clock() / SLOT_S)
        for report in reports:
            window = self._windows.setdefault(report.tenant, _Window())
            window.add(number, report.requests_used, report.tokens_used)

    def keep(self, tenants: Iterable[str]) -> None:
        """Forget all tenants but these."""
        kept = set(tenants)
        self._windows = {name: window for name, window in self._windows.items() if name in kept}

    async def settle(self, reports: Sequence[Report]) -> list[Grant]:
        """See Ledger."""
        self.record(reports)
        return [self._grant(report) for report in reports]

    def _grant(self, report: Report) -> Grant:
        slots = self._windows[report.tenant].slots
        limits, now_s = report.limits, self._clock()
        requests, requests_left = _share(
            limits.requests_per_minute, sum(slot.requests for slot in slots), report.requests_wanted
        )
        tokens, tokens_left = _share(limits.tokens_per_minute, sum(slot.tokens for slot in slots), report.tokens_wanted)
        at_once = report.at_once_wanted
        return Grant(
            requests=requests,
            tokens=tokens,
            at_once=at_once if limits.requests_at_once is None else min(at_once, limits.requests_at_once),
            requests_left=requests_left,
            tokens_left=tokens_left,
            gateways=1,
            slots=tuple(Slot((slot.number + SLOTS + 1) * SLOT_S - now_s, slot.requests, slot.tokens) for slot in slots),
        )


def _share(limit: int | None, used: int, wanted: int) -> tuple[int, int]:
    if limit is None:
        return wanted, 0
    share = max(0, min(wanted, limit - used))
    return share, max(0, limit - used - share)
