"""Settings in the form that a result stores."""

from __future__ import annotations

import math
from typing import Any

from loadgen.measure.pods import without_password


def storable(value: Any) -> Any:
    """Return the value in a form that JSON can hold: lists of text, non-finite numbers as text. URLs lose passwords."""
    if isinstance(value, list):
        return [without_password(str(item)) for item in value]
    if isinstance(value, str):
        return without_password(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
