"""`make gpu-test` finds its tests on a machine without the plug-ins that the other tests have."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.cuda.gpu_pytest import ROOT, gpu_pytest


def test_its_settings_know_every_mark_and_option() -> None:
    done = gpu_pytest("--collect-only", "-q", "tests/engine/cuda", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_cuda_backend_gpu.py" in done.stdout


TESTS = """
import os
import torch

def test_fails():
    assert 6 * 9 == 42

def test_is_killed():
    os.kill(os.getpid(), 9)

def test_loses_the_card(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    torch.cuda.is_available, torch.cuda.synchronize = (lambda: True), lost

def test_behind():
    raise AssertionError("it ran")
"""


def run(folder: Path, *chosen: str) -> subprocess.CompletedProcess[str]:
    """Run tests under gpu-test's settings."""
    (folder / "test_it.py").write_text(TESTS)
    return gpu_pytest(*(f"{folder / 'test_it.py'}::{name}" for name in chosen), timeout_s=100)


def test_a_run_that_is_killed_has_shown_what_failed(tmp_path: Path) -> None:
    done = run(tmp_path, "test_fails", "test_is_killed")
    assert done.returncode == -signal.SIGKILL
    assert "test_fails, call: " in done.stdout
    assert "assert (6 * 9) == 42" in done.stdout


def test_the_test_that_loses_the_card_is_the_last(tmp_path: Path) -> None:
    done = run(tmp_path, "test_loses_the_card", "test_behind")
    assert done.returncode == 1
    assert "test_loses_the_card has lost the card: CUDA error: an illegal memory access was encountered" in done.stdout
    assert "it ran" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_a_card_it_fails_and_says_so() -> None:
    """Otherwise it would pass in Triton's interpreter, and seem to have run on a card."""
    done = subprocess.run(
        ["make", "gpu-test", f"GPU_PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    said = f"make gpu-test needs a CUDA device; the torch of {sys.executable} sees none"
    assert said in done.stderr.splitlines()
    assert "-m pytest" not in done.stdout
