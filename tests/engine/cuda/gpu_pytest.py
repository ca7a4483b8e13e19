"""Runs pytest in a separate process with the settings of `make gpu-test`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def gpu_pytest(*arguments: str, timeout_s: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run pytest and return the ended process; `environ` is added to the environment."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/engine/cuda/gpu.ini", "--rootdir=."]
    plain = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        env={**plain, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
