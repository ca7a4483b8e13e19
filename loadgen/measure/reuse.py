"""How much of the prompts could have been reused, and what that leaves undone.

The bound is one infinite cache that all pods share and that holds a prompt from the moment it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.measure.records import Records

STRIDE_BYTES = 256
"""Bytes behind each prefix key: `engine.contract.keys.DEFAULT_STRIDE_BYTES`."""
NO_KEYS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Attainable:
    """Over the completed requests whose prefix keys were kept. Tokens are the prompt's tokens by share of bytes."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attainable_tokens: float = 0.0
    duplicated_tokens: float = 0.0
    """Attainable, but prefilled all the same: sum over requests of max(0, attainable - cached)."""

    def __add__(self, other: Attainable) -> Attainable:
        return Attainable(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.attainable_tokens + other.attainable_tokens,
            self.duplicated_tokens + other.duplicated_tokens,
        )

    @property
    def rate(self) -> float | None:
        """Attainable / prompt tokens; None where nothing is known."""
        return self.attainable_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def achieved_share(self) -> float | None:
        """Cached / attainable tokens; None where nothing was attainable."""
        return self.cached_tokens / self.attainable_tokens if self.attainable_tokens else None


def attainable(records: Records) -> Attainable:
    """What a run from empty caches could have reused, given the order in which it sent its prompts."""
    order = np.argsort(records.sent_s, kind="stable")
    has_strides = records.prompt_bytes[order] >= STRIDE_BYTES
    keys = [records.keys_of(row) if long else NO_KEYS for row, long in zip(order.tolist(), has_strides, strict=True)]
    # A prompt without a whole stride has no keys, and nothing to find; another one without keys did not keep them.
    known = np.array([len(found) > 0 for found in keys], bool) | (~has_strides & (records.prompt_bytes[order] > 0))
    rows, strides = order[known], seen_strides([found for found, is_known in zip(keys, known, strict=True) if is_known])
    counted = (records.failure[rows] == 0) & records.has_usage[rows]
    rows, strides = rows[counted], strides[counted]
    prompt, cached = records.prompt_tokens[rows], records.cached_tokens[rows]
    could = strides * STRIDE_BYTES / records.prompt_bytes[rows] * prompt
    return Attainable(
        requests=len(rows),
        prompt_tokens=int(prompt.sum()),
        cached_tokens=int(cached.sum()),
        attainable_tokens=float(could.sum()),
        duplicated_tokens=float(np.maximum(could - cached, 0).sum()),
    )


def seen_strides(prompts: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
    """For each prompt, in sending order: how many of its leading prefix keys an earlier prompt had.

    Keys are chained, so that a key seen before means that all before it were: counting suffices.
    """
    lengths = np.array([len(keys) for keys in prompts], np.int64)
    owner = np.repeat(np.arange(len(prompts)), lengths)
    _, first, inverse = np.unique(np.concatenate([NO_KEYS, *prompts]), return_index=True, return_inverse=True)
    seen = owner[first][inverse] < owner
    return np.bincount(owner, weights=seen, minlength=len(prompts)).astype(np.int64)


def duplicate_prompts(hashes: npt.NDArray[np.uint64]) -> int:
    """Requests whose whole prompt was sent before; requests without a hash (0) do not count."""
    known = hashes[hashes != 0]
    return len(known) - len(np.unique(known))
