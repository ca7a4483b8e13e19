"""Identifies processors whose sums have the same bits. KV from a processor with other bits is not exact here."""

from __future__ import annotations

from hashlib import sha256

import torch

from engine.model.exact import HEIGHTS, cancelling

_TERMS, _COLUMNS = 1024, 64


def cpu_arithmetic() -> tuple[str, ...]:
    """Return torch's version, the instructions that it uses here, and a digest of results that show how it rounds."""
    bits = sha256()
    for dtype in (torch.float32, torch.bfloat16):
        x, w = cancelling(_TERMS, _COLUMNS, dtype)
        for height in HEIGHTS:
            bits.update((x.expand(height, -1).contiguous() @ w).float().numpy().tobytes())
    line = torch.linspace(-20, 20, 4096)
    for function in (torch.exp, torch.rsqrt, torch.sigmoid, torch.sin):
        bits.update(function(line.abs() + 0.1).numpy().tobytes())
    capability: str = torch.backends.cpu.get_cpu_capability()
    return torch.__version__, capability, bits.hexdigest()[:16]
