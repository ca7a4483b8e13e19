"""Which models clients may name."""

from __future__ import annotations

import orjson
from aiohttp import web

from router.edge.client_keys import tenant_of
from router.fleet.fleet import Fleet
from router.operators.json_answer import json_response
from router.reading.names import Names, check_allowed, find_model
from router.tenants.tenant import Tenant


class ModelList:
    """Handlers of `/v1/models`."""

    def __init__(self, fleet: Fleet, names: Names) -> None:
        self._fleet = fleet
        self._names = names

    async def models(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/models`."""
        return self.listed(tenant_of(request))

    async def model(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/models/{model}`. Raises as `one`."""
        return self.one(request.match_info["model"], tenant_of(request))

    def listed(self, tenant: Tenant) -> web.Response:
        """Return the models of all pods and the operator's names that the tenant may use, each model as its first pod
        describes it."""
        models = self._fleet.models()
        cards = {name: models[name].card for name in models if tenant.may_use(name)}
        cards |= self._names.cards(models, tenant)
        return json_response({"object": "list", "data": [orjson.Fragment(cards[name]) for name in sorted(cards)]})

    def one(self, name: str, tenant: Tenant) -> web.Response:
        """Return one model, as in the list. Raises Forbidden, ModelNotFound or Unavailable."""
        check_allowed(tenant, name)
        if name in self._names:
            card = self._names.cards(self._fleet.models(), tenant).get(name)
            if card is None:
                name = self._names.model(name, tenant, lambda model: False, b"")  # raises: it is not served
            else:
                return json_response(orjson.Fragment(card))
        return json_response(orjson.Fragment(find_model(self._fleet, name, tenant).card))
