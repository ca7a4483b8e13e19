"""Which model a request means: the one that it names, or the one that an operator's name stands for.

An operator's name is an alias for one model, or a split of conversations over several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from engine.contract.bounded_json import loads
from engine.contract.errors import BadRequest, ModelNotFound, Unavailable, quoted
from engine.contract.keys import FIELD_SEPARATOR, content_parts
from engine.contract.requests import Endpoint, prompt_bytes
from engine.contract.responses import response_messages
from router.edge.errors import RETRY_AFTER_S, SCALING_RETRY_AFTER_S, Forbidden, NoEngine
from router.fleet.fleet import Fleet
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

    def is_split(self, name: str) -> bool:
        """Whether one of the operator's names stands for several models."""
        return len(self._shares[name]) > 1

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
                cards = [loads(model.card) for model in served if model is not None]
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


class Models:
    """Finds the model that a request means, among those that engines serve."""

    def __init__(self, fleet: Fleet, names: Names | None = None, *, wakes_models: bool = False) -> None:
        """`names`: names that stand for models. `wakes_models`: accept known models that no engine serves."""
        self._fleet = fleet
        self._names = names or Names()
        self._wakes_models = wakes_models

    def only_model(self, tenant: Tenant) -> str | None:
        """Return the only model that the tenant can ask for; None if there are none or several."""
        allowed = list(filter(tenant.may_use, self._fleet.models()))
        return allowed[0] if len(allowed) == 1 else None

    def meant(self, asked: str | None, tenant: Tenant, words: Callable[[], bytes]) -> str | None:
        """Return the name to ask engines for. `words`: returns bytes that tell the conversation from others. It is
        called only if they choose one of several models.

        Raises Forbidden unless the tenant may use both the name that it asks for and the model that this stands for.
        """
        name = self._names.default if asked is None else asked
        own, adapter = ("", "") if name is None else self._names.split(name)
        if name is None or not own or (adapter and self._is_known(name)):
            return name
        check_allowed(tenant, name)
        known = words() if self._names.is_split(own) else b""
        return self._names.model(own, tenant, self._is_served, known, partial(self._on, adapter) if adapter else str)

    def _on(self, adapter: str, model: str) -> str:
        """Return the engines' name for the adapter on that model: vLLM lists it by its own name, SGLang wants both."""
        is_listed = any(adapter in pod.facts.adapters for pod in self._fleet.pods(model))
        return adapter if is_listed else f"{model}:{adapter}"

    def _is_served(self, name: str) -> bool:
        return bool(self._fleet.pods(name) or self._fleet.pods(name.rpartition(":")[0]))

    def find(self, name: str | None, tenant: Tenant) -> tuple[str, str]:
        """Return the name of the model and that of the adapter on it, empty without one.

        SGLang accepts `model:adapter` but does not list it; other engines list each adapter as a model. The engine
        refuses an adapter that does not exist.
        """
        if name is not None:
            check_allowed(tenant, name)
            base, _, adapter = name.rpartition(":")
            if adapter and self._is_on(base, name):
                name = base
            else:
                adapter = ""
            if not (self._wakes_models and self._fleet.is_known(name)):
                find_model(self._fleet, name, tenant)
            return name, adapter
        served = self._fleet.models()
        if not served:
            raise Unavailable("no engine has answered yet", retry_after_s=RETRY_AFTER_S)
        allowed = [name for name in served if tenant.may_use(name)]
        if len(allowed) != 1:
            which = f"one of: {', '.join(sorted(allowed))}" if allowed else "but no model that this key may use is up"
            raise BadRequest(f"model is required, {which}", param="model")
        return allowed[0], ""

    def _is_on(self, base: str, name: str) -> bool:
        """Whether a name means an adapter on `base` and not a model. The models behind the operator's names are known
        from the start. So while `base` is served, the name of such a model means the model only if it is served too."""
        served = self._fleet.models()
        if name in served:
            return False
        return self._is_known(base) and (
            not self._fleet.is_known(name) or (base in served and name in self._names.models)
        )

    def _is_known(self, name: str) -> bool:
        return name in self._fleet.models() or self._fleet.is_known(name)


def check_allowed(tenant: Tenant, name: str) -> None:
    """Raise Forbidden if the tenant may not ask for that name. The error does not tell whether the model exists."""
    if not tenant.may_use(name):
        raise not_allowed(name)


def find_model(fleet: Fleet, name: str, tenant: Tenant = DEFAULT) -> ServedModel:
    """Return the model of that name. Raises ModelNotFound, or Unavailable if no engine serves it at the moment."""
    known = fleet.models()
    if name in known:
        return known[name]
    if fleet.is_known(name):
        raise NoEngine(name, retry_after_s=SCALING_RETRY_AFTER_S)
    if not known:
        raise Unavailable("no engine has answered yet", retry_after_s=RETRY_AFTER_S)
    names = ", ".join(sorted(filter(tenant.may_use, known)))
    raise ModelNotFound(f"model {quoted(name)} does not exist; known: {names}", param="model", code="model_not_found")
