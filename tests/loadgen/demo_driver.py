"""`warmroute-loadgen demo` and `demo-fleet`; fake_program.py replaces engine and gateway. Runs as a script."""

from __future__ import annotations

import sys

from loadgen.__main__ import main
from loadgen.commands.compare import CompareSettings
from loadgen.demo import fleet, run, stack


class QuickSettings(CompareSettings):
    """Traffic without long pauses."""

    think_s: float = 0.05
    settle_s: float = 0.1


def fake_module(name: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.loadgen.fake_program", name, *flags]


if __name__ == "__main__":
    run.CompareSettings = fleet.CompareSettings = QuickSettings  # type: ignore[attr-defined]
    run.BLOCK_S = fleet.BLOCK_S = 0.3
    stack.module_command = fake_module
    main(sys.argv[1:])
