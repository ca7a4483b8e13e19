"""Names that stand for models: an alias for one, a split for several of which each conversation keeps to one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from engine.contract.errors import BadRequest, quoted
from engine.contract.keys import FIELD_SEPARATOR, content_parts
from engine.contract.requests import Endpoint, prompt_bytes
from engine.contract.responses import response_messages
from router.fleet.probe import ServedModel
from router.gateway.errors import Forbidden
from router.tenants.tenant import DEFAULT, Tenant

NOT_ALLOWED = "model_not_allowed"
"""Code of the error for a model that the tenant may not use."""
PROMPT_BYTES = 256
"""Of a prompt without messages, so many bytes tell one conversation from another."""

Shares = tuple[tuple[str, int], ...]


class Names:
    """The operator's names. What a name stands for is never looked up a second time: there are no chains."""

    def __init__(self, shares: Mapping[str, Shares] | None = None, default: str | None = None) -> None:
        """`shares`: models by name, with their weights. `default`: asked for by requests that name nothing."""
        self._shares = shares or {}
        self.default = default

    def __contains__(self, name: object) -> bool:
        return name in self._shares

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that a name stands for, each once."""
        return tuple(dict.fromkeys(model for shares in self._shares.values() for model, _ in shares))

    def model(self, name: str, tenant: Tenant, is_served: Callable[[str], bool], words: bytes) -> str:
        """The model that `name` stands for in the conversation of `tenant` with these first `words`.

        Equal on every gateway with the same names. A model without an engine gets nothing while another of the split
        has one. When a weight changes, only the conversations in the part that moves change over. Raises Forbidden
        where the tenant may use none of the models.
        """
        allowed = self._allowed(name, tenant)
        if not allowed:
            raise not_allowed(name)
        if len(allowed) == 1:
            return allowed[0][0]
        digest = xxh3_64_intdigest(FIELD_SEPARATOR.join((name.encode(), tenant.name.encode(), words)))
        model = _pick(allowed, digest)
        if not is_served(model):
            served = tuple(share for share in allowed if is_served(share[0]))
            model = _pick(served, digest) if served else model
        return model

    def cards(self, models: Mapping[str, ServedModel], tenant: Tenant = DEFAULT) -> dict[str, bytes]:
        """The model cards of the names that the tenant may ask for, where a model that they stand for is known."""
        found = {}
        for name in self._shares:
            if tenant.may_use(name):
                cards = [
                    orjson.loads(models[model].card) for model, _ in self._allowed(name, tenant) if model in models
                ]
                if cards:
                    found[name] = orjson.dumps(_card(name, cards))
        return found

    def _allowed(self, name: str, tenant: Tenant) -> Shares:
        return tuple(share for share in self._shares[name] if share[1] and tenant.may_use(share[0]))


def not_allowed(name: str) -> Forbidden:
    """The tenant may not ask for that name; whether there is such a model is not told."""
    return Forbidden(f"this API key may not use model {quoted(name)}", param="model", code=NOT_ALLOWED)


def first_words(endpoint: Endpoint, fields: Mapping[str, Any]) -> bytes:
    """What tells a conversation from others and is the same in each of its turns: its first user message.

    A prompt without messages has its first PROMPT_BYTES in place of that. Empty for what is no request: others say so.
    """
    try:
        if endpoint is Endpoint.COMPLETIONS:
            return prompt_bytes(fields.get("prompt"))[:PROMPT_BYTES]
        if endpoint is Endpoint.RESPONSES:
            return _first_message(response_messages(None, fields.get("input")))
        return _first_message(fields.get("messages"))
    except BadRequest:
        return b""


def _first_message(messages: object) -> bytes:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") == "user":
            return b"".join(content_parts(message.get("content"), i))
    return b""


def _pick(shares: Shares, digest: int) -> str:
    """The model whose part of the weights, side by side in their order, holds the place that a 64-bit digest names."""
    place = digest * sum(weight for _, weight in shares) >> 64
    for model, weight in shares:
        if place < weight:
            return model
        place -= weight
    raise AssertionError("a place beyond all weights")


def _card(name: str, cards: list[dict[str, Any]]) -> dict[str, Any]:
    """The first model's card under another name, with the shortest context of all: a request fits each of them."""
    card = {**cards[0], "id": name}
    lengths = [length for one in cards if isinstance(length := one.get("max_model_len"), int)]
    return {**card, "max_model_len": min(lengths)} if lengths else card
