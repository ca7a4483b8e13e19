"""Reads and writes the headers `traceparent` and `tracestate` (https://www.w3.org/TR/trace-context-2/)."""

from __future__ import annotations

import re
from typing import NamedTuple

from multidict import MultiMapping

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
SAMPLED = 1
RANDOM = 2
"""Flag of level 2: the last 56 bits of the trace id are random, so a sampler may use them."""
MAX_STATE_CHARS = 512
"""Length of a `tracestate` that everyone must pass on. A longer one is dropped whole, as the standard allows."""
# A later version may have more fields after another dash. Version ff and ids of zeros are invalid.
_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?"
)
_STATE = re.compile(r"[\x20-\x7e]*")


class Remote(NamedTuple):
    """The caller's span. `flags`: `SAMPLED` and `RANDOM`."""

    trace_id: int
    span_id: int
    flags: int
    state: str


def read(incoming: MultiMapping[str]) -> Remote | None:
    """Return the caller's span that a request continues; None if there is none or the headers are invalid."""
    if TRACEPARENT not in incoming:
        return None
    parents = incoming.getall(TRACEPARENT)
    if len(parents) != 1 or len(parents[0]) > MAX_STATE_CHARS:
        return None
    match = _PARENT.fullmatch(parents[0])
    if match is None or (match[1] == "00" and match[5]):
        return None
    state = ",".join(incoming.getall(TRACESTATE, ()))
    if len(state) > MAX_STATE_CHARS or not _STATE.fullmatch(state):
        state = ""
    return Remote(int(match[2], 16), int(match[3], 16), int(match[4], 16) & (SAMPLED | RANDOM), state)


def fields(trace_id: int, span_id: int, flags: int, state: str) -> bytes:
    """Return both headers with their line ends; `tracestate` only if there is a state."""
    line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, flags)
    return line + f"{TRACESTATE}: {state}\r\n".encode("ascii") if state else line
