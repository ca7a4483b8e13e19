"""Without a card, kernels are interpreted."""

from __future__ import annotations

from tests.interpreted import interpret_kernels

interpret_kernels()
