"""The changes that the cache reports to the publisher."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.events import Tier
from engine.contract.prefix_key import PrefixKey


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Net change of the held prefix keys since the last report; a key is in one of the two at most."""

    removed: tuple[PrefixKey, ...] = ()
    """Children first."""
    stored: tuple[tuple[PrefixKey, Tier], ...] = ()
    """Parents first."""
