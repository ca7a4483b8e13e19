"""`warmroute-loadgen demo-fleet`: the comparison on a fleet of emulated GPU pods."""

from __future__ import annotations

from collections.abc import Sequence

from engine.common.settings import load_or_exit
from loadgen.demo.demo import run_demo
from loadgen.demo.fleet import FleetSettings, fleet_demo

PROG = "warmroute-loadgen demo-fleet"


def run(argv: Sequence[str]) -> int:
    """Return the exit status; exit with 2 on bad flags."""
    settings = load_or_exit(FleetSettings, argv, PROG)
    return run_demo(lambda folder, progress: fleet_demo(settings, folder, progress), settings.out, PROG)
