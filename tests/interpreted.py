"""Triton's kernels without a card."""

from __future__ import annotations

import os
import sys

import torch


def interpret_kernels() -> None:
    """Where there is no card, have kernels interpreted in this process: Triton decides when it is imported.

    Raises RuntimeError where that has happened.
    """
    if not torch.cuda.is_available():
        if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
            raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it for the whole of pytest")
        os.environ["TRITON_INTERPRET"] = "1"
