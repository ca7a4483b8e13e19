"""How long tools take, learnt from the requests that bring their results. There is no clock: callers pass the time."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

FIRST_PAUSE_S = 10.0
"""How long a conversation is kept while too few pauses have been seen."""
LEAST_PAUSE_S = 1.0
"""A conversation is kept for at least this long, however fast tools are."""
MOST_PAUSE_S = 120.0
"""A conversation is kept for at most this long, however slow tools are."""
WAITED_S = 600.0
"""If a conversation does not go on within this time after an answer, the answer counts as its last."""
QUANTILE = 0.9
"""Share of the pauses that a kept conversation outlasts."""
MARGIN = 1.25
"""Factor on that quantile, because the next pause may be longer than those seen."""
LEAST_SHARE = 0.25
"""Conversations are kept only if a tool's result follows at least this share of the answers."""
_SEEN = 128
"""Number of pauses that are remembered."""
_ENOUGH = 8
"""Number of pauses that must be seen before they replace `FIRST_PAUSE_S`."""
_FORGET = 1 / 32
"""Weight of the latest answer in the share of answers that a tool's result follows."""
_MOST_AWAITED = 4096


class ToolPauses:
    """Answers that may have called a tool, by conversation, and how earlier conversations went on."""

    def __init__(self) -> None:
        self._awaited: OrderedDict[bytes, float] = OrderedDict()
        """Conversation -> when its answer ended, the oldest first."""
        self._pauses: deque[float] = deque(maxlen=_SEEN)
        self._share = 0.5
        self._lifetime_s = FIRST_PAUSE_S

    @property
    def lifetime_s(self) -> float:
        """Seconds for which a conversation is worth keeping now; 0: it is not worth keeping."""
        return self._lifetime_s if self._share >= LEAST_SHARE else 0.0

    def ended(self, conversation: bytes, now_s: float) -> None:
        """Note that an answer that may have called a tool has ended."""
        awaited = self._awaited
        awaited.pop(conversation, None)
        awaited[conversation] = now_s
        while awaited:
            oldest, ended_s = next(iter(awaited.items()))
            if now_s - ended_s <= WAITED_S and len(awaited) <= _MOST_AWAITED:
                break
            del awaited[oldest]
            self._learn_share(0.0)

    def is_awaited(self, conversation: bytes) -> bool:
        """Whether an answer has ended and its conversation has not gone on since."""
        return conversation in self._awaited

    def goes_on(self, conversation: bytes, now_s: float, *, with_result: bool) -> None:
        """Note that an awaited conversation has gone on.

        `with_result`: with a tool's result, and not with another question.
        """
        pause_s = now_s - self._awaited.pop(conversation)
        self._learn_share(float(with_result))
        if with_result:
            self._pauses.append(pause_s)
        if len(self._pauses) >= _ENOUGH:
            rank = math.ceil(QUANTILE * len(self._pauses))
            lifetime_s = MARGIN * sorted(self._pauses)[rank - 1]
            self._lifetime_s = min(max(lifetime_s, LEAST_PAUSE_S), MOST_PAUSE_S)

    def _learn_share(self, outcome: float) -> None:
        self._share += _FORGET * (outcome - self._share)
