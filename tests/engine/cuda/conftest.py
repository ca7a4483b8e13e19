"""Kernels run on the card where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import interpret_kernels

interpret_kernels()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
