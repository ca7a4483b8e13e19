"""A tiny real checkpoint for the programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model.checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 64: a real Llama checkpoint that answers in milliseconds."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_position=4096)
    return folder
