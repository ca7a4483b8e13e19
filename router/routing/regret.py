"""Regret: how much sooner the best other pod would have answered, once the answer is known.

A decision keeps one of the pods that were not chosen: the rival, the pod with the soonest predicted first token. The
request did not run there, so the rival's time is the prediction, corrected by the one thing that the answer tells about
every pod: the number of prompt tokens. If `n` tokens were estimated and the prompt has `m`, the rival's own prefill
takes `m / n` times as long, and its first token comes after

    ttft_s + prefill_s * (m / n - 1)

The chosen pod's real match and real queue say nothing about the rival. A rival is the best of several predictions, so
its prediction is too early more often than not. Compare regret with gain, and with the regret of a week ago. Neither
number shows what another policy would gain.
"""

from __future__ import annotations

import math

from router.views.table import Floats, Seconds, number_at
from router.views.types import Rival


def rival_of(ttfts_s: Floats, prefills_s: Seconds, chosen: int) -> Rival | None:
    """Return the rival of the pod `chosen`; None if there is no other pod. `prefills_s`: each pod's prefill of the
    request."""
    if len(ttfts_s) < 2:
        return None
    chosen_s, ttfts_s[chosen] = ttfts_s[chosen], math.inf
    row = int(ttfts_s.argmin())
    least_s = float(ttfts_s[row])
    ttfts_s[chosen] = chosen_s
    return Rival(row, least_s, number_at(prefills_s, row))


def regret_s(rival: Rival, actual_s: float, *, estimated_tokens: int, prompt_tokens: int | None) -> float:
    """Return the seconds by which the first token would have come sooner on the rival; negative: later.

    `actual_s`: the real time to first token. `prompt_tokens`: the engine's count; None: as estimated.
    """
    share = 1.0 if prompt_tokens is None else prompt_tokens / max(1, estimated_tokens)
    return actual_s - (rival.ttft_s + rival.prefill_s * (share - 1.0))
