"""Settings in the form that a result stores."""

from __future__ import annotations

import math
from typing import Any


def storable(value: Any) -> Any:
    """Return the value in a form that JSON can hold: lists of text, non-finite numbers as text."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
