"""What is known of an engine beyond who it is: which program it runs, how much its cache holds, what it can be asked.

Nothing here is needed to serve: an engine of which nothing is known is sent requests as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

EngineKind = Literal["warmroute", "vllm", "sglang", "unknown"]
MAX_ADAPTERS = 1024
"""Adapters of one engine, as many as it may list models."""
MAX_CAPACITY_TOKENS = 10**9
"""Of one rank's cache. The largest fleets' nodes hold some ten million; more is a mistake."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of one target: an engine, or one data-parallel rank of it. None, or empty, where not known."""

    engine: EngineKind = "unknown"
    version: str | None = None
    kv_capacity_tokens: int | None = None
    """Tokens whose KV this target's cache holds on the GPU, running requests' included."""
    block_tokens: int | None = None
    """Tokens of a KV block; only whole ones are reused."""
    ranks: int | None = None
    """Data-parallel ranks behind the engine's URL, this one included."""
    rank: int | None = None
    """Which of them this target is; None: the engine chooses among them, or has one."""
    kv_event_ports: tuple[int, ...] = ()
    """TCP ports of the engine's KV events, by rank."""
    kv_replay_ports: tuple[int, ...] = ()
    """TCP ports at which past events are asked for, by rank."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it lists as models of their own."""


def engine_kind(cards: Iterable[bytes], *, has_epoch: bool) -> EngineKind:
    """Which program it is, by the models' cards in `/v1/models` and by whether it tells its lives apart.

    Our engine in front of nothing else is the one that has an epoch; `owned_by` names the others.
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
    """The base model of an adapter's card, as vLLM and SGLang write it; None for a model of its own."""
    fields = _fields(card)
    parent = fields.get("parent")
    return parent if isinstance(parent, str) and parent and parent != fields.get("id") else None


def _fields(card: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(card)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
