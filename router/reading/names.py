"""Names that stand for models: an alias for one model, or a split of conversations over several models. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from engine.contract.errors import BadRequest, quoted
from engine.contract.keys import FIELD_SEPARATOR, content_parts
from engine.contract.requests import Endpoint, prompt_bytes
from engine.contract.responses import response_messages
from router.edge.errors import Forbidden
from router.fleet.probe import ServedModel
from router.tenants.tenant import DEFAULT, Tenant

NOT_ALLOWED = "model_not_allowed"
"""Code of the error for a model that the tenant may not use."""
PROMPT_BYTES = 256
"""In a prompt without messages, this many bytes tell one conversation from another."""

Shares = tuple[tuple[str, int], ...]


class Names:
    """The operator's names. What a name stands for is not looked up as a name again, so there are no chains."""

    def __init__(self, shares: Mapping[str, Shares] | None = None, default: str | None = None) -> None:
        """`shares`: models by name, with their weights. `default`: name for requests that give none."""
        self._shares = shares or {}
        self.default = default

    def __contains__(self, name: object) -> bool:
        return name in self._shares

    @property
    def models(self) -> tuple[str, ...]:
        """Return every model that a name stands for, each once."""
        return tuple(dict.fromkeys(model for shares in self._shares.values() for model, _ in shares))

    def split(self, name: str) -> tuple[str, str]:
        """Split `name` or `name:adapter` into the operator's name and the adapter on its model. Both are empty if
        `name` is not one of the operator's."""
        if name in self._shares:
            return name, ""
        own, _, adapter = name.rpartition(":")
        return (own, adapter) if adapter and own in self._shares else ("", "")

    def model(
        self,
        name: str,
        tenant: Tenant,
        is_served: Callable[[str], bool],
        words: bytes,
        behind: Callable[[str], str] = str,
    ) -> str:
        """Return the model that `name` stands for in the conversation of `tenant` with these first `words`.

        `behind`: returns, for one of the models, what the request would run on: the model itself, or an adapter on it.

        The result is equal on every gateway with the same names. A model without an engine gets nothing while another
        model of the split has an engine. If a weight changes, only the conversations in the shifted share change their
        model. Raises Forbidden if the tenant may use none of the models.
        """
        allowed = self._allowed(name, tenant, behind)
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
        """Return the model cards of the names that the tenant may ask for and that stand for a known model."""
        found = {}
        for name in self._shares:
            if tenant.may_use(name):
                served = (_served(model, models) for model, _ in self._allowed(name, tenant))
                cards = [orjson.loads(model.card) for model in served if model is not None]
                if cards:
                    found[name] = orjson.dumps(_card(name, cards))
        return found

    def _allowed(self, name: str, tenant: Tenant, behind: Callable[[str], str] = str) -> Shares:
        shares = ((behind(model), weight) for model, weight in self._shares[name] if weight)
        return tuple(share for share in shares if tenant.may_use(share[0]))


def not_allowed(name: str) -> Forbidden:
    """Return the error of a name that the tenant may not ask for. It does not tell whether the model exists."""
    return Forbidden(f"this API key may not use model {quoted(name)}", param="model", code=NOT_ALLOWED)


def first_words(endpoint: Endpoint, fields: Mapping[str, Any]) -> bytes:
    """Return the first user message, which tells a conversation from others and is the same in each of its turns.

    For a prompt without messages, return its first PROMPT_BYTES. Empty for an invalid request, which is refused later.
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
    """Return the model at the point that a 64-bit digest selects when the weights are laid end to end."""
    place = digest * sum(weight for _, weight in shares) >> 64
    for model, weight in shares:
        if place < weight:
            return model
        place -= weight
    raise AssertionError("a place beyond all weights")


def _served(model: str, models: Mapping[str, ServedModel]) -> ServedModel | None:
    """Return the model of that name. If engines do not list it, it is `model:adapter`: return the base model."""
    return models.get(model) or models.get(model.rpartition(":")[0])


def _card(name: str, cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first model's card under another name, with the shortest context of all, so a request fits each."""
    card = {**cards[0], "id": name}
    lengths = [length for one in cards if isinstance(length := one.get("max_model_len"), int)]
    return {**card, "max_model_len": min(lengths)} if lengths else card
