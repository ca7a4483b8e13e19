"""The prefix keys that the cache holds: a count of anchor blocks per key, and the net change since the last report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.cache.changes import KeyChanges
from engine.contract.events import Tier
from engine.contract.prefix_key import PrefixKey


class Span(Protocol):
    """A prefix key and the number of leading prompt tokens it covers (`engine.sched.request.KeySpan`)."""

    @property
    def key(self) -> PrefixKey: ...
    @property
    def tokens(self) -> int: ...


Anchor = tuple[int, PrefixKey]
"""The index of a block in a request's chain, and a key that is held while that block is resident."""


def anchors(spans: Sequence[Span], prompt_tokens: int, block_size: int) -> tuple[Anchor, ...]:
    """Return where each key of a request is anchored, in the order of `spans`; block indexes never decrease.

    A key stands for the whole blocks it covers. The block that straddles the key's end also holds later tokens, so it
    does not belong to the key. A key shorter than a block is anchored with the next key that has a whole block: it is
    held with its children, or not at all. If no key has a whole block, the result is empty.
    """
    found: list[Anchor] = []
    highest = -1
    for span in spans:
        tokens = span.tokens
        index = (tokens if tokens < prompt_tokens else prompt_tokens) // block_size - 1
        if index > highest:
            if highest < 0:
                found = [(index, key) for _, key in found]
            highest = index
        found.append((highest, span.key))
    return tuple(found) if highest >= 0 else ()


class HeldKeys:
    """Keys with at least one anchor block resident.

    Invariant: callers hold a key after its parents and drop it before them. So the dictionary has parents first. Net
    changes are in the order of their first cause, which is the order that a reader needs.
    """

    def __init__(self) -> None:
        self._blocks_of: dict[PrefixKey, int] = {}
        self._net: dict[PrefixKey, bool] = {}

    def hold(self, key: PrefixKey) -> None:
        """Count one more resident block that anchors the key."""
        count = self._blocks_of.get(key, 0)
        self._blocks_of[key] = count + 1
        if count == 0:
            self._note(key, stored=True)

    def drop(self, key: PrefixKey) -> None:
        """Count one fewer resident block that anchors the key."""
        count = self._blocks_of[key] - 1
        if count:
            self._blocks_of[key] = count
        else:
            del self._blocks_of[key]
            self._note(key, stored=False)

    def clear(self) -> None:
        """Drop every key from every block."""
        for key in reversed(tuple(self._blocks_of)):
            self._blocks_of[key] = 1
            self.drop(key)

    def keys(self) -> tuple[PrefixKey, ...]:
        """Return every held key, parents first."""
        return tuple(self._blocks_of)

    def counts(self) -> dict[PrefixKey, int]:
        """Return the number of anchor blocks per held key."""
        return dict(self._blocks_of)

    @property
    def has_changes(self) -> bool:
        """Whether there is a net change since the last report."""
        return bool(self._net)

    def take_changes(self) -> KeyChanges:
        """Return the net change since the last call."""
        removed = tuple(key for key, stored in self._net.items() if not stored)
        added = tuple((key, Tier.GPU) for key, stored in self._net.items() if stored)
        self._net.clear()
        return KeyChanges(removed, added)

    def _note(self, key: PrefixKey, *, stored: bool) -> None:
        """Note a change. If it undoes one not reported yet, both are dropped, so the number kept is bounded."""
        if self._net.pop(key, stored) == stored:
            self._net[key] = stored
