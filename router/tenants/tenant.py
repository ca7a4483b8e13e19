"""A tenant: its keys and its rights. Plain values, as in the tenants' file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How much a tenant may ask of all gateways together. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts, cached ones included, and of answers."""
    requests_at_once: int | None = None


@dataclass(frozen=True, slots=True)
class TenantKey:
    """An API key, as its SHA-256."""

    digest: bytes
    expires_s: float | None = None
    """Seconds since 1970; None: never."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Equal content means equal tenants, so reading a file again changes nothing by itself."""

    name: str
    weight: float = 1.0
    """Its share relative to other tenants when there is not enough for all."""
    highest_priority: int = 0
    """The highest priority that its requests may ask for."""
    ttft_goal_s: float | None = None
    """Seconds within which its first tokens should come under overload; 0: no goal; None: the gateway's goal."""
    models: tuple[str, ...] = ("*",)
    """Globs of the names that it may ask for."""
    limits: TenantLimits | None = None
    """None: no limits."""
    is_isolated: bool = False
    """Whether it shares no cache with others."""
    tells_cache: bool = True
    """Whether its answers have the headers about pods and caches."""
    keys: tuple[TenantKey, ...] = ()
    _matches: Callable[[str], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_matches", _matcher(self.models))

    def may_use(self, model: str) -> bool:
        """Return whether it may ask for a model of that name."""
        return self._matches(model) is not None


def _matcher(globs: Sequence[str]) -> Callable[[str], object]:
    return re.compile("|".join(translate(glob) for glob in globs)).match


DEFAULT = Tenant("default")
"""The tenant of a client if no file names tenants, and of a client whose key names none."""
