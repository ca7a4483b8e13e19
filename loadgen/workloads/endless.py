"""What workloads without an end share: no length, and fields that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from loadgen.workloads.draws import Zipf, facts


class Endless:
    """Base of a workload, a dataclass, that has a session for every number."""

    __slots__ = ()

    @property
    def length(self) -> int | None:
        """Return None: there is no end."""
        return None

    def about(self) -> Mapping[str, str]:
        """Return the settings."""
        return facts(self)


@dataclass(frozen=True, slots=True)
class Popular(Endless):
    """Base of a workload whose units, such as tenants, have Zipf popularity by its field `zipf`."""

    units: ClassVar[str]
    """Name of the field with the number of units."""
    _popularity: Zipf = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count, exponent = (getattr(self, name) for name in (self.units, "zipf"))
        object.__setattr__(self, "_popularity", Zipf(count, exponent))
