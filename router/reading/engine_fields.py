"""Fields of a body by which a client would reach another host, another request or the engine's process.

No official client sends them; proxies inside a fleet do, and they ask engines, not gateways. A field is refused by name
if the answer without it would be another one. It is left out if the answer is the same; the answer's header `warning`
names it. A value that asks for nothing (null, or an empty text, list or object) passes.

Sources: the request classes of vLLM (vllm/entrypoints/openai) and SGLang (sglang/srt/entrypoints/openai/protocol.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.contract.errors import BadRequest

REFUSED: Mapping[str, str] = {
    "kv_transfer_params": "it names blocks of other engines and their addresses",
    "ec_transfer_params": "it names encoder outputs of other engines and their addresses",
    "bootstrap_host": "it names another engine",
    "bootstrap_port": "it names another engine",
    "bootstrap_room": "it names another engine's request",
    "session_params": "it names a session that another client may have opened",
    "custom_logit_processor": "it is a program",
    "lora_path": "name the adapter in the field model, as MODEL:ADAPTER",
}
"""Fields, and why they are refused or what to write instead."""
DROPPED = frozenset(
    ("request_id", "rid", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_dp_rank")
)
"""Fields that name the request, which the gateway does, or choose a rank, which the gateway does too."""
NESTED = "vllm_xargs"
"""vLLM merges this field's own fields with `kv_transfer_params` and the like."""
_ALL = DROPPED | REFUSED.keys() | {NESTED}


class FieldRefused(BadRequest):
    """400: the body has a field of REFUSED; `field` names it."""

    def __init__(self, field: str, where: str) -> None:
        super().__init__(f"{where} is not for clients: {REFUSED[field]}", param=where, code="field_not_allowed")
        self.field = field


def without_effect(fields: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the fields of a body that engines must not get, sorted. Raises FieldRefused."""
    found = _ALL & fields.keys()
    if not found:
        return ()
    nested = fields.get(NESTED)
    within = {f"{NESTED}.{name}": (name, value) for name, value in nested.items()} if isinstance(nested, dict) else {}
    for where, (name, value) in (within | {name: (name, fields[name]) for name in found}).items():
        if name in REFUSED and not _asks_nothing(value):
            raise FieldRefused(name, where)
    return sorted(name for name in found & DROPPED if fields[name] is not None)


def warning_of(names: Sequence[str]) -> str:
    """Return the value of the header `warning` (RFC 7234, section 5.5) for fields that engines did not get."""
    return f'199 warmroute "not for clients, left out: {", ".join(names)}"'


def _asks_nothing(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
