"""Kernels run on the card where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is imported: from here on in this process, kernels are interpreted.
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it for the whole of pytest")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
