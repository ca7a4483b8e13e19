"""What a request hears of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sched.plan import SampledToken
from engine.sched.request import FinishReason


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(slots=True)
class TokenOutput:
    """A request's next token. The token that ends a request by a stop id is among them.

    Never changed, though not frozen (`plan.py`).
    """

    request_id: int
    token: SampledToken | None
    finish: FinishReason | None
    cached_tokens: int
    """Prompt tokens reused at the first admission."""
    kept_tokens: int = 0
    """Leading prompt tokens that stay in the pool because the request's marks ask for it: those of whole blocks."""
    unkept_tokens: int = 0
    """Those behind them that the marks ask for and that had no room."""
