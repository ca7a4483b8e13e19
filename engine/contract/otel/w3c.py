"""The headers `traceparent` and `tracestate` (https://www.w3.org/TR/trace-context-2/), as they come and go on."""

from __future__ import annotations

import re
from typing import NamedTuple

from multidict import MultiMapping

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
SAMPLED = 1
RANDOM = 2
"""Flag of level 2: the last 56 bits of the trace id are random, so a sampler may go by them."""
MAX_STATE_CHARS = 512
"""What every participant has to pass on; a longer state is left out whole, as the standard allows."""
# A later version may have more fields behind a further dash. Version ff and ids of zeros are invalid.
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
    """Whose trace a request with these headers continues; None: nobody's, or its headers are not valid."""
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
    """Both headers as they are sent, with their line ends; the state only where there is one."""
    line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, flags)
    return line + f"{TRACESTATE}: {state}\r\n".encode("ascii") if state else line
