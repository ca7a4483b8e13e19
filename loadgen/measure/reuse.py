"""How much of the prompts could have been reused, and how much of that was not.

The bound is one infinite cache that all pods share. It holds a prompt from the moment it is sent, and the answer too,
except its last token, which no engine computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.measure.records import Ints, Records

STRIDE_BYTES = 256
"""Bytes per prefix key: `engine.contract.keys.DEFAULT_STRIDE_BYTES`."""
WARM_START = 0.02
"""If the run found more cached tokens than it could have left, by over this share of its prompt tokens, the caches were
not empty at first."""
NO_KEYS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Attainable:
    """Sums over the completed requests whose prefix keys were kept; bytes are converted to the prompt's tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attainable_tokens: float = 0.0
    most_tokens: float = 0.0
    """Attainable tokens if each hit were a stride longer: keys cover whole strides of bytes, engines count tokens."""
    duplicated_tokens: float = 0.0
    """Tokens prefilled although they were attainable: sum over requests of max(0, attainable - cached)."""

    def __add__(self, other: Attainable) -> Attainable:
        return Attainable(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.attainable_tokens + other.attainable_tokens,
            self.most_tokens + other.most_tokens,
            self.duplicated_tokens + other.duplicated_tokens,
        )

    @property
    def rate(self) -> float | None:
        """Return attainable / prompt tokens; None if nothing is known."""
        return self.attainable_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def is_exceeded(self) -> bool:
        """Return whether more was cached than these prompts can explain."""
        return self.cached_tokens > self.most_tokens + WARM_START * self.prompt_tokens

    @property
    def achieved_share(self) -> float | None:
        """Return cached / attainable tokens, at most 1 unless `is_exceeded`; None if nothing was attainable."""
        if not self.attainable_tokens:
            return None
        share = self.cached_tokens / self.attainable_tokens
        return share if self.is_exceeded else min(share, 1.0)


def attainable(records: Records) -> Attainable:
    """Return what a run that starts with empty caches could have reused, given the order of its prompts."""
    order = np.argsort(records.sent_s, kind="stable")
    has_strides = records.prompt_bytes[order] >= STRIDE_BYTES
    keys = [records.keys_of(row) if long else NO_KEYS for row, long in zip(order.tolist(), has_strides, strict=True)]
    # A prompt shorter than a stride has no keys and nothing to find. If a longer prompt has no keys, none were kept.
    known = np.array([len(found) > 0 for found in keys], bool) | (~has_strides & (records.prompt_bytes[order] > 0))
    rows, strides = order[known], seen_strides([found for found, is_known in zip(keys, known, strict=True) if is_known])
    counted = (records.failure[rows] == 0) & records.has_usage[rows]
    rows, strides = rows[counted], strides[counted]
    prompt, cached = records.prompt_tokens[rows], records.cached_tokens[rows]
    tokens_per_byte = prompt / records.prompt_bytes[rows]
    went_on = np.minimum(_after_answers(records, rows), prompt)
    whole = np.maximum(strides * STRIDE_BYTES * tokens_per_byte, went_on)
    most = np.maximum(np.minimum((strides + 1) * STRIDE_BYTES * tokens_per_byte, prompt), went_on)
    could = np.maximum(whole, np.minimum(cached, most))  # what was found was attainable
    return Attainable(
        requests=len(rows),
        prompt_tokens=int(prompt.sum()),
        cached_tokens=int(cached.sum()),
        attainable_tokens=float(could.sum()),
        most_tokens=float(most.sum()),
        duplicated_tokens=float(np.maximum(could - cached, 0).sum()),
    )


def _after_answers(records: Records, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each of `rows` the tokens of the conversation that it continues; 0 if it begins one."""
    answered = np.flatnonzero(records.completed & records.has_usage)
    turns = _turn_keys(records.session[answered], records.turn[answered])
    order = np.argsort(turns)
    wanted = _turn_keys(records.session[rows], records.after[rows])
    at = np.minimum(np.searchsorted(turns, wanted, sorter=order), max(len(order) - 1, 0))
    if not len(order):
        return np.zeros(len(rows), np.int64)
    found = order[at]
    tokens = records.prompt_tokens[answered][found] + records.output_tokens[answered][found] - 1
    is_known = (turns[found] == wanted) & (records.after[rows] >= 0)
    return np.asarray(np.where(is_known, np.maximum(tokens, 0), 0), np.int64)


def _turn_keys(session: Ints, turn: Ints) -> npt.NDArray[np.int64]:
    return (session.astype(np.int64) << 20) + turn


def seen_strides(prompts: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
    """Return for each prompt, in sending order, how many of its leading prefix keys an earlier prompt had.

    Keys are chained: if a key was seen before, all keys before it were seen. So counting suffices.
    """
    lengths = np.array([len(keys) for keys in prompts], np.int64)
    owner = np.repeat(np.arange(len(prompts)), lengths)
    _, first, inverse = np.unique(np.concatenate([NO_KEYS, *prompts]), return_index=True, return_inverse=True)
    seen = owner[first][inverse] < owner
    return np.bincount(owner, weights=seen, minlength=len(prompts)).astype(np.int64)


def duplicate_prompts(hashes: npt.NDArray[np.uint64]) -> int:
    """Count the requests whose whole prompt was sent before; requests without a hash (0) do not count."""
    known = hashes[hashes != 0]
    return len(known) - len(np.unique(known))
