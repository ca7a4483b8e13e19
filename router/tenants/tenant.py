"""A tenant: who asks, and what they may. Plain values, as the tenants' file says them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How much a tenant may ask for, of all gateways together. None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts, cached ones included, and of answers."""
    requests_at_once: int | None = None


@dataclass(frozen=True, slots=True)
class TenantKey:
    """An API key, by its SHA-256."""

    digest: bytes
    expires_s: float | None = None
    """Seconds since 1970; None: never."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Two of the same content are equal: a file that is read again changes nothing by itself."""

    name: str
    weight: float = 1.0
    """Its share beside the other tenants' where there is not enough for all."""
    highest_priority: int = 0
    """The highest that its requests may ask for."""
    models: tuple[str, ...] = ("*",)
    """Globs of the names it may ask for."""
    limits: TenantLimits | None = None
    """None: none at all."""
    is_isolated: bool = False
    """Whether what it has cached is nobody else's, and what others have cached is not its own."""
    tells_cache: bool = True
    """Whether its answers have the headers that tell of pods and caches."""
    keys: tuple[TenantKey, ...] = ()
    _matches: Callable[[str], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_matches", _matcher(self.models))

    def may_use(self, model: str) -> bool:
        """Whether it may ask for a model of that name."""
        return self._matches(model) is not None


def _matcher(globs: Sequence[str]) -> Callable[[str], object]:
    return re.compile("|".join(translate(glob) for glob in globs)).match


DEFAULT = Tenant("default")
"""Who asks where no file names tenants, and who shows a key of the file that names none."""
