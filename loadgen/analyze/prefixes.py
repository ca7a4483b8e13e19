"""The stretches of prompt that save the most. A reader recognises a system prompt, a document or a history in them."""

from __future__ import annotations

import numpy as np

from loadgen.analyze.blocks import Sharing
from loadgen.analyze.model import SharedPrefix

_PREFIXES = 5


def top_runs(sharing: Sharing) -> dict[int, list[int]]:
    """Return the runs that save the most, grouped by the first request that has them."""
    uses = np.bincount(sharing.path_runs, minlength=len(sharing.run_blocks))
    saved = (uses - 1) * sharing.run_blocks
    out: dict[int, list[int]] = {}
    for run in np.argsort(-saved, kind="stable")[:_PREFIXES].tolist():
        if saved[run] > 0:
            request = int(np.searchsorted(sharing.starts, sharing.run_first[run], side="right")) - 1
            out.setdefault(request, []).append(run)
    return out


def prefixes(sharing: Sharing, begins: dict[int, str]) -> tuple[SharedPrefix, ...]:
    """Return the runs in `begins` as shared prefixes; `begins` maps each run to the beginning of its text."""
    uses = np.bincount(sharing.path_runs, minlength=len(sharing.run_blocks))
    found = []
    for run, text in begins.items():
        first = int(sharing.run_first[run])
        request = int(np.searchsorted(sharing.starts, first, side="right")) - 1
        at = (first - int(sharing.starts[request])) * sharing.block_tokens
        tokens = int(sharing.run_blocks[run]) * sharing.block_tokens
        found.append(SharedPrefix(requests=int(uses[run]), from_token=at, to_token=at + tokens, begins=text))
    return tuple(sorted(found, key=lambda p: -p.requests * (p.to_token - p.from_token)))
