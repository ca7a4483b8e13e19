"""A model of an engine's prefix cache and its events, with whole blocks, LRU eviction and a toy tokenizer.

As in vLLM, no event tells of reused blocks, a request's blocks are freed from last to first, and a store event has
the session of its request. The model only uses tokens, and does not use `router.events`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgpack

from engine.contract.keys import PrefixKey, key_seed, prefix_keys

STRIDE = 16
MODEL = "m"


def uniform_tokens(text: bytes) -> list[tuple[int, int]]:
    """Return tokens of four bytes each, as id and end in the text. The last token may be shorter."""
    return [(int.from_bytes(text[at : at + 4], "big"), min(at + 4, len(text))) for at in range(0, len(text), 4)]


def uneven_tokens(text: bytes) -> list[tuple[int, int]]:
    """Like `uniform_tokens`, but with tokens of one to eight bytes. The lengths depend on the bytes."""
    tokens, start = [], 0
    for at in range(1, len(text) + 1):
        if at - start == 8 or text[at - 1] % 5 == 0 or at == len(text):
            tokens.append((int.from_bytes(text[start:at], "big"), at))
            start = at
    return tokens


def keys_of(text: bytes) -> tuple[PrefixKey, ...]:
    """Return the prefix keys of a prompt."""
    return prefix_keys(text, key_seed(MODEL), STRIDE)


def chain(tokens: Sequence[int], size: int) -> list[int]:
    """Return the engine's name of each whole block of `tokens`: a hash of all tokens up to the block's end."""
    names, last = [], 0
    for end in range(size, len(tokens) + 1, size):
        last = hash((last, *tokens[end - size : end])) & 0xFFFF_FFFF_FFFF_FFFF
        names.append(last)
    return names


class ModelEngine:
    """An engine with room for `room` blocks. `batches` are all batches of events that it published, encoded."""

    def __init__(self, room: int, block_tokens: int) -> None:
        self.room = room
        self.block_tokens = block_tokens
        self.used: dict[int, None] = {}
        """The blocks in the cache, those that were unused for longest first."""
        self.batches: list[bytes] = []

    def serve(self, tokens: Sequence[int], session: str | None, *, generated: Sequence[int] = ()) -> int:
        """Serve one request from beginning to end, and return how many tokens of its prompt were reused."""
        size, everything = self.block_tokens, [*tokens, *generated]
        names = chain(everything, size)[: self.room]
        held = 0
        while held < len(names) and names[held] in self.used:
            held += 1
        new = {name for name in names if name not in self.used}
        events: list[Any] = []
        for name in names:
            self.used.pop(name, None)
        while len(self.used) + len(names) > self.room:
            oldest = next(iter(self.used))
            del self.used[oldest]
            events.append({"type": "BlockRemoved", "block_hashes": [oldest], "medium": "GPU", "group_idx": 0})
        for is_new, run in itertools.groupby(enumerate(names), key=lambda one: one[1] in new):
            if is_new:
                run_names = [name for _, name in run]
                at = names.index(run_names[0])
                text = everything[at * size : (at + len(run_names)) * size]
                events.append(stored(run_names, names[at - 1] if at else None, text, size, session))
        for name in reversed(names):
            self.used[name] = None
        self.publish(events)
        return min(held * size, (len(tokens) - 1) // size * size)

    def clear(self) -> None:
        """Empty the cache."""
        self.used.clear()
        self.publish([{"type": "AllBlocksCleared"}])

    def publish(self, events: list[Any]) -> None:
        """Publish a batch of these events."""
        self.batches.append(msgpack.packb([float(len(self.batches)), events, 0]))

    def held_blocks(self, tokens: Sequence[int]) -> int:
        """Return how many blocks at the beginning of `tokens` are held."""
        names = chain(tokens, self.block_tokens)
        return next((at for at, name in enumerate(names) if name not in self.used), len(names))


def stored(
    names: list[int], parent: int | None, tokens: Sequence[int], size: int, session: str | None = None
) -> dict[str, Any]:
    """Return an event as vLLM 0.32 sends it."""
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event if session is None else event | {"session_id": session}
