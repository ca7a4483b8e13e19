"""What is known of an engine beyond its identity: which program it runs, the size of its cache, what it can answer.

None of this is needed to serve: an engine without known facts gets requests as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from engine.contract.bounded_json import loads

EngineKind = Literal["warmroute", "vllm", "sglang", "unknown"]
MAX_ADAPTERS = 1024
"""Adapters of one engine: as many as the models that it may list."""
MAX_CAPACITY_TOKENS = 10**9
"""Largest cache of one rank that is believed, in tokens. The largest nodes hold some ten million."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of one target: an engine, or one data-parallel rank of it. None, or empty: not known."""

    engine: EngineKind = "unknown"
    version: str | None = None
    kv_capacity_tokens: int | None = None
    """Tokens whose KV this target's cache holds on the GPU, including running requests."""
    block_tokens: int | None = None
    """Tokens of a KV block; only whole blocks are reused."""
    ranks: int | None = None
    """Data-parallel ranks behind the engine's URL, this one included."""
    rank: int | None = None
    """Which of the ranks this target is; None: the engine chooses the rank, or has only one."""
    kv_event_ports: tuple[int | None, ...] = ()
    """TCP ports of the engine's KV events, by rank; None: not given for that rank."""
    kv_replay_ports: tuple[int | None, ...] = ()
    """TCP ports that replay past events, by rank."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it lists as separate models."""


def engine_kind(cards: Iterable[bytes], *, has_epoch: bool) -> EngineKind:
    """Return which program it is, from the models' cards in `/v1/models` and from whether it reports an epoch.

    Only our engine, with no proxy in front, has an epoch; `owned_by` names the others.
    """
    if has_epoch:
        return "warmroute"
    for card in cards:
        match _fields(card).get("owned_by"):
            case "vllm":
                return "vllm"
            case "sglang":
                return "sglang"
            case "warmroute":
                return "warmroute"
    return "unknown"


def parent_of(card: bytes) -> str | None:
    """Return the base model in an adapter's card, as vLLM and SGLang write it; None if the model has no base."""
    fields = _fields(card)
    parent = fields.get("parent")
    return parent if isinstance(parent, str) and parent and parent != fields.get("id") else None


def _fields(card: bytes) -> dict[str, Any]:
    try:
        fields = loads(card)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
