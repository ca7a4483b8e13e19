"""Which tenants take less than others at the moment. Pure: every time is seconds of one monotonic clock, passed in."""

from __future__ import annotations

HALF_LIFE_S = 1.0
"""What was let go so long ago counts half. Short: a tenant that begins to ask for much goes ahead of the others for no
longer than about this."""
WITHIN = 0.9
"""Of the tokens of the flow that got most: a flow with less is within its share. Flows that the queue holds get equal
tokens for their weights but for a request or two, which is far less than the other tenth."""
FADE_S = 0.1
"""How often the old counts less: not for each request, of which each costs a look at every flow."""
LEAST_TOKENS = 1.0
"""A flow with less is forgotten."""


class Shares:
    """Tokens for its weight that each flow was let go of late, of those that had to wait."""

    __slots__ = ("_faded_s", "_limit", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        """By flow: no more than tenants are configured."""
        self._limit = 0.0
        """Tokens below which a flow is within its share."""
        self._faded_s = 0.0

    def let_go(self, flow: str, tokens: float, now_s: float) -> None:
        """A request was sent; `tokens` divided by the flow's weight."""
        self._fade(now_s)
        total = self._tokens[flow] = self._tokens.get(flow, 0.0) + tokens
        self._limit = max(self._limit, WITHIN * total)

    def is_within(self, flow: str, now_s: float) -> bool:
        """Whether the flow got clearly less than another: nothing that it asks for now has to be held for fairness."""
        self._fade(now_s)
        return self._tokens.get(flow, 0.0) < self._limit

    def are_uneven(self, now_s: float) -> bool:
        """Whether any flow is within its share beside one that is not."""
        self._fade(now_s)
        return len(self._tokens) > 1 and min(self._tokens.values()) < self._limit

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._faded_s
        if passed_s < FADE_S:
            return
        factor = 0.5 ** (passed_s / HALF_LIFE_S)
        self._tokens = {
            flow: tokens * factor for flow, tokens in self._tokens.items() if tokens * factor >= LEAST_TOKENS
        }
        self._limit = WITHIN * max(self._tokens.values(), default=0.0)
        self._faded_s = now_s
