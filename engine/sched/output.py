"""What the scheduler returns for a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sched.plan import SampledToken
from engine.sched.request import FinishReason


class QueueFull(Exception):
    """The number of waiting requests is at its limit."""


@dataclass(slots=True)
class TokenOutput:
    """A request's next token. A stop token that ends the request is returned, too.

    It is never changed, though not frozen (`plan.py`).
    """

    request_id: int
    token: SampledToken | None
    finish: FinishReason | None
    cached_tokens: int
    """Prompt tokens reused at the first admission."""
    kept_tokens: int = 0
    """Leading prompt tokens, in whole blocks, that stay in the pool because the request's marks ask for it."""
    unkept_tokens: int = 0
    """Further tokens that the marks ask for but for which there was no room."""
