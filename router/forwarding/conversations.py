"""Conversations that engines keep: a request with `previous_response_id` or `conversation` goes to the pod with it."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256

from engine.contract.errors import ApiError, Unavailable, quoted
from router.edge.errors import RETRY_AFTER_S
from router.fleet.fleet import Fleet
from router.forwarding.exchange import Exchange
from router.reading.inbound import Inbound
from router.stored.places import Place, Places
from router.tenants.marks import unmarked
from router.views.types import PodId

RESPONSE_ID = re.compile(r"[A-Za-z0-9_.-]{1,200}")
"""An id that an engine may give to a response."""
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_.-]{1,200})"')
HEAD_BYTES = 2**14
"""Bytes of an answer that are searched: its id is among the first fields of the answer or of its first event."""
_CODES = {"previous_response_id": "previous_response_not_found", "conversation": "conversation_not_found"}


class NotKept(ApiError):
    """404: no engine has the conversation that the request continues. `param` is the field that names it."""

    status = 404
    type = "invalid_request_error"


def response_id(head: bytes) -> str:
    """Return the id of the response in the first bytes of an answer; empty if it is not there."""
    found = _ID.search(head[:HEAD_BYTES])
    return found[1].decode() if found else ""


def _place_name(field: str, key: str, tenant: str) -> str:
    """Return the name under which the place of `key` is kept; empty if there can be none.

    Clients choose the ids of conversations. So each tenant has its own, they are never taken for the ids of responses,
    and none has characters with a meaning in a key of Redis.
    """
    if field == "conversation":
        both = f"{tenant}\x1f{key}".encode(errors="surrogatepass")
        return f"conversation/{sha256(both).hexdigest()}"
    return key if RESPONSE_ID.fullmatch(key) else ""


class Conversations:
    """Finds the pods that have conversations. Another tenant's conversations are reported as unknown."""

    def __init__(self, fleet: Fleet, places: Places, *, has_tenants: bool = False) -> None:
        self._fleet = fleet
        self._places = places
        self._has_tenants = has_tenants

    async def place(self, inbound: Inbound, tenant: str) -> Place | None:
        """Return the place of the conversation that the request continues; None if the request may go to any pod.

        It may if nobody knows the conversation that it names. Raises NotKept for a response that is unknown, and for
        what is another tenant's. Without tenants and with a single pod, a request with an unknown response goes to that
        pod, which reports the error itself.
        """
        if inbound.continues is None:
            return None
        name, key = inbound.continues
        kept_as = _place_name(name, key, tenant)
        found = await self._places.find(kept_as) if kept_as else None
        if found is not None and found.tenant == tenant:
            return found
        is_anothers = found is not None
        if not is_anothers and name == "conversation":
            return None
        # A pod does not know tenants, so it could serve a response that is unknown here and is another tenant's.
        if not is_anothers and not self._has_tenants and len(self._fleet.pods(inbound.model)) == 1:
            return None
        what = "Conversation" if name == "conversation" else "Previous response"
        raise NotKept(
            f"{what} with id {quoted(unmarked(key))} not found: it is unknown here, or was forgotten; send the whole "
            "conversation as input",
            param=name,
            code=_CODES[name],
        )

    def bound(self, inbound: Inbound, place: Place) -> Inbound:
        """Return the request bound to `place`. Raises NotKept if its pod is gone, Unavailable if the pod is away."""
        assert inbound.continues is not None
        name, key = inbound.continues[0], unmarked(inbound.continues[1])
        pod = self._fleet.pod(PodId(place.pod))
        if pod is None or inbound.model not in {model.name for model in pod.identity.models}:
            why = "the engine that had it is gone" if pod is None else f"it belongs to model {quoted(place.model)}"
            raise NotKept(
                f"{name} {quoted(key)} not found: {why}; send the whole conversation as input",
                param=name,
                code=_CODES[name],
            )
        if pod not in self._fleet.pods(inbound.model):
            raise Unavailable(
                f"the engine that has {name} {quoted(key)} takes no requests at the moment: try again, or send the "
                "whole conversation as input",
                param=name,
                code="no_engine",
                retry_after_s=RETRY_AFTER_S,
            )
        return replace(inbound, only=pod.pod_id, prompt_tokens=inbound.prompt_tokens + place.tokens)

    def began(self, exchange: Exchange, head: bytes, pod: PodId) -> None:
        """When an engine begins to answer at `/v1/responses`, record what it will keep, before the client can ask for
        that."""
        inbound = exchange.inbound
        if inbound is None:
            return
        tenant = exchange.arrival.tenant.name
        names = [response_id(head)] if inbound.stores else []
        if inbound.continues is not None and inbound.continues[0] == "conversation":
            names.append(_place_name(*inbound.continues, tenant))
        exchange.kept([name for name in names if name and not self._is_anothers(name, tenant)])
        for name in exchange.keeps:
            self._places.put(name, Place(pod, inbound.model, tenant))

    def _is_anothers(self, name: str, tenant: str) -> bool:
        """Whether an engine gives the tenant an id that another tenant has: the first owner keeps it."""
        known = self._places.known(name)
        return known is not None and known.tenant != tenant

    def ended(self, exchange: Exchange) -> None:
        """Record the length of the conversation, which is known once the answer has ended."""
        if not exchange.keeps or exchange.last is None or exchange.inbound is None:
            return
        usage = exchange.usage
        tokens = (usage.prompt_tokens or exchange.inbound.prompt_tokens) + (usage.completion_tokens or 0)
        place = Place(exchange.last.pod.pod_id, exchange.inbound.model, exchange.arrival.tenant.name, tokens)
        for name in exchange.keeps:
            self._places.share(name, place)
