"""Workloads made from another one: a working set sized by cache capacity, some consecutive sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from engine.common.settings import ConfigError
from loadgen.workloads.base import Session, Workload
from loadgen.workloads.draws import checked

MAX_UNITS = 1_000_000


class Scalable(Workload, Protocol):
    """A workload whose shared tokens come in units of about equal size, such as tenants. A frozen dataclass."""

    units: ClassVar[str]
    """Name of the field with the number of units."""

    @property
    def unit_tokens(self) -> float:
        """Return the mean of the shared tokens of a unit."""
        ...


S = TypeVar("S", bound=Scalable)


@dataclass(frozen=True, slots=True)
class Window:
    """Some consecutive sessions of a workload, numbered from 0; their own times begin at 0 too."""

    workload: Workload
    first: int
    count: int
    speed: float = 1.0
    """Factor by which the workload's own times pass faster."""

    @property
    def name(self) -> str:
        """Return the name of the workload."""
        return self.workload.name

    @property
    def length(self) -> int | None:
        """Return the number of sessions in the window."""
        return self.count

    def session(self, number: int) -> Session:
        """Return session `first + number` of the workload, with its time counted from the window's start."""
        whole = self.workload.session(self.first + checked(number, self.count))
        if whole.start_s is None:
            return replace(whole, number=number)
        begun_s = self.workload.session(self.first).start_s or 0.0
        return replace(whole, number=number, start_s=(whole.start_s - begun_s) / self.speed)

    def about(self) -> Mapping[str, str]:
        """Return the workload's facts, and the part that is used."""
        return {**self.workload.about(), "window": f"{self.count} sessions from number {self.first}"}


@dataclass(frozen=True, slots=True)
class Sized:
    """A workload whose working set was sized to a share of the cluster's KV capacity."""

    workload: Scalable
    cluster_kv_tokens: int

    @property
    def name(self) -> str:
        """Return the name of the workload."""
        return self.workload.name

    @property
    def length(self) -> int | None:
        """Return the number of sessions of the workload."""
        return self.workload.length

    def session(self, number: int) -> Session:
        """Return the session of the workload."""
        return self.workload.session(number)

    def about(self) -> Mapping[str, str]:
        """Return the workload's facts, and the pressure reached: a whole number of units."""
        tokens = working_set_tokens(self.workload)
        return {
            **self.workload.about(),
            "working set": f"{tokens:,.0f} tokens that recur",
            "cache pressure": f"{tokens / self.cluster_kv_tokens:.3g} of {self.cluster_kv_tokens:,} KV tokens",
        }


def working_set_tokens(workload: Scalable) -> float:
    """Return the shared tokens that recur: units times their mean size. Histories recur too, but are not counted."""
    return float(getattr(workload, workload.units) * workload.unit_tokens)


def with_pressure(workload: S, pressure: float, cluster_kv_tokens: int) -> S:
    """Return the workload with the number of units (at least one) that makes its working set
    `pressure * cluster_kv_tokens`.

    Raises ConfigError if more than a million units are needed.
    """
    units = max(1, round(pressure * cluster_kv_tokens / workload.unit_tokens))
    if units > MAX_UNITS:
        raise ConfigError(
            f"--cache-pressure {pressure:g} of {cluster_kv_tokens:,} tokens would take {units:,} {workload.units} of"
            f" {workload.unit_tokens:,.0f} tokens, more than {MAX_UNITS:,}: make them larger"
        )
    changed: Any = {workload.units: units}
    return replace(workload, **changed)  # type: ignore[type-var]  # a protocol cannot ask for a dataclass
