"""Comparisons and sweeps of these tests rest not at all between blocks, and warm up briefly."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.commands.compare.SETTLE_S", 0.0)
    monkeypatch.setattr("loadgen.commands.compare.WARMUPS", 2)
    monkeypatch.setattr("loadgen.commands.sweep.SETTLE_S", 0.0)
