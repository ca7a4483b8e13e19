"""Which prefix keys are held, and in which tier: the fastest tier that holds a key counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.cache.changes import KeyChanges
from engine.contract.events import Keys, Tier
from engine.contract.prefix_key import PrefixKey


class KeyHolder(Protocol):
    """One tier's account of its keys (`PrefixCache`). The tier holds a key only while it holds the key's parents."""

    def take_changes(self) -> KeyChanges:
        """Return the net change since the last call. The tiers named in it mean nothing here."""
        ...


class TieredKeys:
    """The tiers' accounts combined into one.

    Every tier holds a key's parents with the key, so the same is true of all tiers together. It stays true at each step
    of a report, because of the report's order: a new key comes after its parents, and a key that is gone from every
    tier comes after its children.
    """

    def __init__(self, holders: Sequence[KeyHolder]) -> None:
        """`holders`: by tier, fastest first."""
        self._holders = holders
        self._held: dict[PrefixKey, int] = {}
        """Key -> the tiers that hold it, a bit each."""
        self._told: dict[PrefixKey, Tier] = {}
        """Key -> its tier as of the last report, parents first."""

    def take_changes(self) -> KeyChanges:
        """Return the net change since the last call: removed keys children first, others parents first."""
        removals, additions = self._apply()
        gone: dict[PrefixKey, None] = {}
        sunk: dict[PrefixKey, None] = {}
        for key in removals:
            places = gone if key not in self._held else sunk
            places.pop(key, None)
            places[key] = None
        removed = [key for key in gone if self._told.pop(key, None) is not None]
        stored: list[tuple[PrefixKey, Tier]] = []
        for key in (*additions, *reversed(sunk)):
            if key in self._held:
                self._tell(key, stored)
        return KeyChanges(tuple(removed), tuple(stored))

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Return every key reported so far, by tier, parents first."""
        by_tier: tuple[list[PrefixKey], ...] = ([], [], [])
        for key, tier in self._told.items():
            by_tier[tier].append(key)
        gpu, host, disk = map(tuple, by_tier)
        return gpu, host, disk

    def _apply(self) -> tuple[list[PrefixKey], list[PrefixKey]]:
        removals: list[PrefixKey] = []
        additions: list[PrefixKey] = []
        for tier, holder in enumerate(self._holders):
            changes = holder.take_changes()
            for key in changes.removed:
                left = self._held.get(key, 0) & ~(1 << tier)
                if left:
                    self._held[key] = left
                else:
                    self._held.pop(key, None)
                removals.append(key)
            for key, _ in changes.stored:
                self._held[key] = self._held.get(key, 0) | 1 << tier
                additions.append(key)
        return removals, additions

    def _tell(self, key: PrefixKey, stored: list[tuple[PrefixKey, Tier]]) -> None:
        bits = self._held[key]
        tier = Tier((bits & -bits).bit_length() - 1)
        if self._told.get(key) is not tier:
            self._told[key] = tier
            stored.append((key, tier))
