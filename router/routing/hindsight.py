"""What the best other pod would have been worth, once the answer is known.

Of the pods that were not chosen the decision keeps one: the rival, where the first token was predicted soonest. No
request ran there, so its time is the prediction, corrected by the one thing that the answer tells of every pod: how
many tokens the prompt has. With `n` tokens estimated and `m` in truth, the rival's own prefill takes `m / n` times as
long, and its first token

    ttft_s + own_s * (m / n - 1)

What the chosen pod turned out to hold, or how long its queue really was, says nothing of the rival. A rival is the best
of several predictions, so it is predicted too early more often than not: compare regret with gain, and with what it was
a week ago, and take neither for what another policy would win.
"""

from __future__ import annotations

import math

from router.routing.types import Rival
from router.routing.wide import Floats


def rival_of(ttfts_s: list[float], owns_s: list[float], chosen: int) -> Rival | None:
    """The rival of the pod `chosen`; None where it is the only one. `owns_s`: each pod's prefill of the request."""
    if len(ttfts_s) < 2:
        return None
    chosen_s, ttfts_s[chosen] = ttfts_s[chosen], math.inf
    least_s = min(ttfts_s)
    pod = ttfts_s.index(least_s)
    ttfts_s[chosen] = chosen_s
    return Rival(pod, least_s, owns_s[pod])


def wide_rival_of(ttfts_s: Floats, owns_s: float | Floats, chosen: int) -> Rival | None:
    """As `rival_of`, of many pods."""
    if len(ttfts_s) < 2:
        return None
    chosen_s, ttfts_s[chosen] = ttfts_s[chosen], math.inf
    pod = int(ttfts_s.argmin())
    least_s = float(ttfts_s[pod])
    ttfts_s[chosen] = chosen_s
    return Rival(pod, least_s, owns_s if isinstance(owns_s, float) else float(owns_s[pod]))


def regret_s(rival: Rival, actual_s: float, *, estimated_tokens: int, prompt_tokens: int | None) -> float:
    """Seconds by which the first token would have come sooner on the rival; negative: later. `actual_s`: when it came.

    `prompt_tokens`: as the engine counted them; None: as estimated.
    """
    share = 1.0 if prompt_tokens is None else prompt_tokens / max(1, estimated_tokens)
    return actual_s - (rival.ttft_s + rival.own_s * (share - 1.0))
