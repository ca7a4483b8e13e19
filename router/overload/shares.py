"""Which tenants take less than others at the moment. Pure: every time is seconds of one monotonic clock, passed in."""

from __future__ import annotations

HALF_LIFE_S = 1.0
"""Age at which let-go tokens count half. It is short, so a tenant that begins to ask for much goes ahead of the others
for about this long at most."""
WITHIN = 0.9
"""A flow counts as within its share if it got less than this part of the tokens of the flow that got most. Flows that
the queue holds get equal tokens for their weights, except for a request or two, which is far less than a tenth."""
FADE_S = 0.1
"""How often old tokens are reduced. It is not done for each request, because it costs a look at every flow."""
LEAST_TOKENS = 1.0
"""A flow with fewer tokens is forgotten."""


class Shares:
    """Tokens, divided by the weight, that were let go of late for each flow whose requests had to wait."""

    __slots__ = ("_faded_s", "_limit", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        """Flow -> tokens: no more flows than configured tenants, or fairness ids that are told apart."""
        self._limit = 0.0
        """Tokens below which a flow is within its share."""
        self._faded_s = 0.0

    def let_go(self, flow: str, tokens: float, now_s: float) -> None:
        """Note that a request was sent; `tokens` is divided by the flow's weight."""
        self._fade(now_s)
        total = self._tokens[flow] = self._tokens.get(flow, 0.0) + tokens
        self._limit = max(self._limit, WITHIN * total)

    def is_within(self, flow: str, now_s: float) -> bool:
        """Return whether the flow got clearly less than another: then fairness holds back none of its requests."""
        self._fade(now_s)
        return self._tokens.get(flow, 0.0) < self._limit

    def are_uneven(self, now_s: float) -> bool:
        """Return whether one flow is within its share and another is not."""
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
