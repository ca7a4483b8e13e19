"""What only a card can run, on an emulated one that does nothing before it must: see `tests/emulated_card`."""

from __future__ import annotations

import re

import pytest
import torch

from tests.engine.cuda.gpu_pytest import gpu_pytest

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
    done = gpu_pytest(
        *("-p", "tests.emulated_card.plugin", f"tests/engine/cuda/{file}", "-k", words),
        timeout_s=280,
        EMULATED_CARD=schedule,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
