"""Without a card, Triton interprets the kernels."""

from __future__ import annotations

from tests.interpreted import interpret_kernels

interpret_kernels()
