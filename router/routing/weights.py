"""Options of `predicted_ttft`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    """See `PolicyOptions`."""

    host_share: float
    disk_share: float
    pressure_weight: float
    stall_weight: float
    switch_margin: float
    same_speed: float
