"""The tiers below a pool."""

from __future__ import annotations

from enum import IntEnum


class Place(IntEnum):
    """Fastest first; the numbers are those of `engine.contract.events.Tier`, which has no SHARED."""

    HOST = 1
    DISK = 2
    SHARED = 3
    """A folder of several engines. It is in no registry message, because all of them reach it."""


class Declined(OSError):
    """A tier does not copy a block, though its medium works: what the block holds has changed, or has no room."""


DECLINED = Declined.__name__
"""The beginning of such an error's text."""
