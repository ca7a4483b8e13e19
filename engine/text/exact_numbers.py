"""JSON whose numbers a prompt shows as the client wrote them.

orjson reads an integer beyond 64 bits as a float, so its last digits are lost. Such an integer in a tool or in a call's
arguments would reach the model changed.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from engine.contract.bounded_json import FREE_BYTES, check

_LONG = re.compile(rb"\d{19}")
"""A number of 19 digits may be beyond 64 bits; one of fewer never is."""


def exact_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, with exact integers. Raises ValueError, also for a float beyond the range of
    float64 and for too many values, and RecursionError."""
    if len(text) > FREE_BYTES // 4:  # characters of at most 4 bytes
        check(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def exact_fields(body: bytes, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields`, which orjson has read from `body`, with exact integers."""
    if _LONG.search(body) is None:
        return fields
    try:
        exact: dict[str, Any] = exact_json(body)
    except (ValueError, RecursionError):  # orjson reads deeper nesting
        return fields
    return exact


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of a number")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
