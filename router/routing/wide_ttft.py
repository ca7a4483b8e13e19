"""The debt after a request."""

from __future__ import annotations

import math

import numpy as np

from router.routing import terms
from router.routing.terms import Costing


def wide_owed_after(costs: Costing, chosen: int, owed_s: float, share: float) -> float:
    """As `predicted_ttft._owed_after`."""
    if isinstance(costs.duplicate_s, float):
        return 0.0
    switches_s, credits_s = terms.switch_s(costs), terms.copy_credit_s(costs)
    if terms.switch_s not in terms.DELAY_TERMS:
        switches_s = costs.duplicate_s * 0.0
    assert not isinstance(switches_s, float)
    is_lacking = costs.duplicate_s > 0
    lacking = is_lacking.nonzero()[0]
    if not len(lacking):
        return 0.0
    scores, best_s = costs.scores, float(costs.scores[chosen])
    if is_lacking[chosen]:
        best_s = float(scores[~is_lacking].min())
        credit_s = 0.0 if isinstance(credits_s, float) else float(credits_s[chosen])
        owed_s -= min(credit_s, max(0.0, float(scores[chosen]) + credit_s - best_s))
    duplicate_s, switch_s = costs.duplicate_s[lacking], switches_s[lacking]
    with_copies_s = scores[lacking]
    if not isinstance(credits_s, float):
        with_copies_s += credits_s[lacking]
    with_copies_s = with_copies_s - switch_s - duplicate_s
    spared_s = math.fsum(np.maximum(best_s - with_copies_s, 0.0).tolist()) / len(lacking)
    return min(owed_s + spared_s / share, float((duplicate_s + switch_s).max()))
