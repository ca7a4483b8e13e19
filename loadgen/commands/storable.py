"""Settings as a result keeps them."""

from __future__ import annotations

import math
from typing import Any


def storable(value: Any) -> Any:
    """The value as JSON has it: lists of text, numbers that are not finite as text."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
