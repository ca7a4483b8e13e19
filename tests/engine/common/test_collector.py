"""Runs `collector_alone.py` in a process of its own.

A process that runs all tests has a million objects. Each of the dozens of collections there would walk all of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ALONE = Path(__file__).with_name("collector_alone.py")


def test_the_collector_in_a_small_process() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(ALONE)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, env=plain, cwd=ALONE.parents[3], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed in", done.stdout), done.stdout
    assert "skipped" not in done.stdout
