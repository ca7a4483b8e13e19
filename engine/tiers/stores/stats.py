"""What the tiers have done since the engine started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.tiers.stores.place import Place


class Decision(StrEnum):
    """What was decided between fetching and computing, for a request that found something in a slower tier."""

    FETCH = "fetch"
    """Fetch all that is there."""
    PART = "part"
    """Fetch some of it; computing the rest is faster."""
    COMPUTE = "compute"
    """Fetch nothing."""


class Outcome(StrEnum):
    """How a fetch ended."""

    ARRIVED = "arrived"
    """All that was wanted has arrived."""
    GIVEN_UP = "given_up"
    """Computing the rest became faster, or its blocks were needed for others."""
    FAILED = "failed"
    """A copy failed; what came before it is used."""


class LookupEnd(StrEnum):
    """How a look-up in the shared tier ended."""

    FOUND = "found"
    """It found blocks that were not known."""
    NOTHING = "nothing"
    LATE = "late"
    """The file system took too long, and the request did not wait for the answer."""
    REFUSED = "refused"
    """Too many look-ups were under way, or a reset was."""


@dataclass(slots=True)
class TierStats:
    """Counters. Blocks are counted by the slower of the two tiers between which they move."""

    demoted: Counter[Place] = field(default_factory=Counter)
    """Blocks copied down."""
    skipped: Counter[Place] = field(default_factory=Counter)
    """Blocks not copied down: the queue was full, the tier was full of blocks in use, or they could not be read."""
    worthless: Counter[Place] = field(default_factory=Counter)
    """Blocks not copied down because computing them again is faster than copying them twice."""
    promoted: Counter[Place] = field(default_factory=Counter)
    """Blocks copied up."""
    query_tokens: Counter[Place] = field(default_factory=Counter)
    """Prompt tokens that the tiers above did not have, of requests about to start."""
    hit_tokens: Counter[Place] = field(default_factory=Counter)
    """Prompt tokens that requests got from the tier."""
    decisions: Counter[Decision] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    lookups: Counter[LookupEnd] = field(default_factory=Counter)
    errors: Counter[Place] = field(default_factory=Counter)
    """Copies that failed."""
    discarded_files: Counter[Place] = field(default_factory=Counter)
    """Files of other models, versions and sizes, and damaged ones, that were removed at the start."""


@dataclass(frozen=True, slots=True)
class SharedSize:
    """A shared tier's folder, as one of its engines knows it."""

    capacity_bytes: int
    held_bytes: int
    """As of this engine's last sweep of the folder, with other models' blocks."""
    events: Mapping[str, int]
    """Event name -> how often this engine has seen it on files since the start."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier at one moment."""

    tier: Place
    blocks: int
    """Blocks that it has room for."""
    held_blocks: int
    """Blocks that hold something."""
    block_bytes: int
    evicted_blocks: int
    """Since the start."""
