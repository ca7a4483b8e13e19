"""Numbered messages: whether the next one follows. Pure, for every stream in which a message may be missing."""

from __future__ import annotations

from enum import Enum


class Step(Enum):
    """What a message's number says."""

    NEXT = "next"
    """It follows the last one."""
    KNOWN = "known"
    """It was heard before, or is part of what was loaded."""
    GAP = "gap"
    """Messages before it are missing."""


def step(last: int, seq: int) -> Step:
    """Return what the number `seq` says to a reader that knows everything up to `last`."""
    if seq <= last:
        return Step.KNOWN
    return Step.NEXT if seq == last + 1 else Step.GAP
