"""Tests that need a card, on an emulated card that works as late as it may: see `tests/emulated_card`."""

from __future__ import annotations

import re

import pytest
import torch

from tests.engine.cuda.answering import MAX_RUNNING
from tests.engine.cuda.gpu_pytest import gpu_pytest

GRAPHS = f"test_answers_are_those_of_the_cpu[{MAX_RUNNING}]"
CHOSEN = {
    "lazy": (
        "test_cuda_backend_gpu.py::test_answers_are_those_of_the_cpu[0]",
        "test_cuda_backend_gpu.py::test_started_as_the_program_starts_it",  # with graphs
        "test_cuda_backend_gpu.py::test_the_pool_takes_its_share_of_the_card",
        "copies/test_copies_torch.py::test_a_round_trip_keeps_every_bit",
        "copies/test_copies_torch.py::test_rates_of_both_directions_are_measured",
        "copies/test_copies_torch.py::test_an_error_of_the_card_ends_the_copy",
    ),
    "random:1": (f"test_cuda_backend_gpu.py::{GRAPHS}",),
    "eager": ("test_cuda_backend_gpu.py::test_a_launch_never_waits_for_the_card",),
}
"""Tests by schedule. A process takes five seconds of a core to import transformers, so a schedule has one process."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", CHOSEN)
def test_nothing_goes_well_by_luck(schedule: str) -> None:
    done = gpu_pytest(
        "-p",
        "tests.emulated_card.plugin",
        *(f"tests/engine/cuda/{test}" for test in CHOSEN[schedule]),
        timeout_s=580,
        EMULATED_CARD=schedule,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
