"""What only a card can run, on an emulated one that does nothing before it must: see `tests/emulated_card`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
CHOSEN = (
    ("lazy", "test_cuda_backend_gpu.py", "program_starts or share_of_the_card"),
    ("lazy", "test_cuda_backend_gpu.py", "answers_are_those or without_gives"),
    ("random:1", "test_cuda_backend_gpu.py", "answers_are_those"),
    ("eager", "test_cuda_backend_gpu.py", "never_waits"),
    ("lazy", "test_copies_torch.py", "cuda or measured or error"),
)
"""Schedules, files, and words of tests; together some 100 s of one core."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("schedule", "file", "words"), CHOSEN)
def test_nothing_goes_well_by_luck(schedule: str, file: str, words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-c", "tests/engine/cuda/gpu.ini", "--rootdir=."]
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "TRITON_INTERPRET")}
    done = subprocess.run(
        [
            *command,
            "-p",
            "tests.emulated_card.plugin",
            "-p",
            "no:cacheprovider",
            f"tests/engine/cuda/{file}",
            "-k",
            words,
        ],
        env=plain | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "EMULATED_CARD": schedule, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
