"""`make gpu-test` finds its tests on a machine without the plug-ins that the other tests have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def test_its_settings_know_every_mark_and_option() -> None:
    command = ["-m", "pytest", "-c", "tests/engine/cuda/gpu.ini", "--rootdir=.", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *command, "--collect-only", "-q", "tests/engine/cuda"],
        env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_cuda_backend_gpu.py" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_a_card_it_fails_and_says_so() -> None:
    """Else it would pass in Triton's interpreter, and seem to have run on a card."""
    done = subprocess.run(
        ["make", "gpu-test", f"GPU_PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    said = f"make gpu-test needs a CUDA device; the torch of {sys.executable} sees none"
    assert said in done.stderr.splitlines()
    assert "-m pytest" not in done.stdout
