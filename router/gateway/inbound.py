"""A generating request, read once: what choosing a pod needs, beside the bytes that are forwarded as they came."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.contract import headers
from engine.contract.errors import BadRequest, ModelNotFound, Unavailable, quoted
from engine.contract.keys import MEDIA_BYTES, PrefixKey, key_seed, prefix_keys
from engine.contract.requests import TOKEN_ID_BYTES, Endpoint, parse_body, request_head
from engine.contract.responses import kept_by_engine
from router.fleet.fleet import Fleet
from router.fleet.probe import ServedModel
from router.gateway.by_load import BY_LOAD, FREE, LONG, asked_model
from router.gateway.errors import NoEngine
from router.gateway.estimates import Estimates
from router.gateway.fields import with_fields
from router.gateway.hints import session_of
from router.gateway.named_cache import FIELD, NamesCache
from router.gateway.names import Names, first_words, not_allowed
from router.routing.types import PodId
from router.tenants.isolation import Isolation
from router.tenants.tenant import DEFAULT, Tenant

MEDIA_TOKENS = 1024
"""Prompt tokens of an image, a sound or a file, whose bytes say nothing of them. Engines make 576 of an image for LLaVA
1.5, 256 to 1,280 for Qwen2-VL with the bounds its authors advise, 4,096 of a megapixel for Pixtral."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_CHATS = (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES)
LOWEST_PRIORITY = -9
"""Of a request: below 0 it is the first to be given up when there is too much."""
_NUMBER = re.compile(r"-?[0-9]{1,6}")
RETRY_AFTER_S = 1.0
SCALING_RETRY_AFTER_S = 5.0
"""For a model without a single engine: one that starts takes a while."""


@dataclass(slots=True)
class Inbound:
    """A request the gateway accepted. Bytes are canonical bytes (DESIGN "Prefix keys"), not the body's.

    Never changed; not frozen because freezing costs a microsecond. So with the other values made for every request.
    """

    endpoint: str
    """Its path: an `Endpoint`, or another for which pods are chosen by load."""
    model: str
    """The one that is served, without the name of an adapter on it."""
    stream: bool
    policy: str
    keys: tuple[PrefixKey, ...]
    prompt_bytes: int
    prompt_tokens: int
    """Estimated, of all prompts; exact for token ids."""
    tokens_per_stride: float
    output_tokens: int
    """Expected length of the answer."""
    teaches_tokens: bool
    """Whether the answer's token count tells how many tokens this model makes of a byte of text."""
    body: bytes
    """As it came, but for `model` where the one asked for is a name for it, `cache_salt` where the gateway makes salts,
    and `priority` where engines are told."""
    prompts: int = 1
    """`keys` and `prompt_bytes` are the first one's."""
    priority: int = 0
    """Higher is sooner."""
    ttft_slo_s: float | None = None
    """Seconds in which the client wants the first token."""
    continues: tuple[str, str] | None = None
    """What an engine has of the conversation: the field that names it, and the id in it."""
    stores: bool = False
    """Whether the engine is to keep the answer for a later request."""
    session: int = 0
    """What the client calls its session (`hints.py`); 0: nothing."""
    is_by_load: bool = False
    """Whether nothing of it is in a cache of prefixes: its answer says nothing of that."""
    is_named: bool = False
    """Whether `model` is what a name of the operator stands for."""
    only: PodId | None = None
    """The one pod that it can go to; None: any."""


class Reader:
    """Turns bodies into Inbound. Raises BadRequest, ModelNotFound or Unavailable, naming the field."""

    def __init__(
        self,
        fleet: Fleet,
        estimates: Estimates,
        *,
        stride: int,
        default_policy: str,
        policies: frozenset[str] | None,
        isolation: Isolation | None = None,
        engine_priority: Literal[-1, 1] | None = None,
        wakes_models: bool = False,
        names: Names | None = None,
    ) -> None:
        """`policies`: names a request may choose from by header; None: it may not. `isolation`: tenants' salts.
        `engine_priority`: sign of the field `priority` that engines get, 1 where higher is sooner for them; None:
        they get none but the client's. `wakes_models`: requests for known models that no engine serves are read too.
        `names`: that stand for models.
        """
        self._names = names or Names()
        self._engine_priority = engine_priority
        self._wakes_models = wakes_models
        self._fleet = fleet
        self._estimates = estimates
        self._stride = stride
        self._default_policy = default_policy
        self._policies = policies
        self._isolation = isolation

    def read(
        self,
        endpoint: Endpoint | None,
        body: bytes,
        incoming: Mapping[str, str],
        tenant: Tenant = DEFAULT,
        meant: str | None = None,
    ) -> Inbound:
        """The request of `tenant` in `body`; without an endpoint, the one that the body's fields belong to. `meant`:
        the model for which a name in it stands, where that is known already.

        Raises NamesCache for one that has to be put together first.
        """
        policy = self._policy(incoming.get(headers.POLICY))
        fields = parse_body(body)
        if FIELD in fields:
            raise NamesCache(fields)
        if endpoint is None:
            endpoint = _endpoint_of(fields)
        head = request_head(endpoint, fields)
        is_response = endpoint is Endpoint.RESPONSES
        if is_response and fields.get("background"):
            raise BadRequest(
                "background is not supported: a response could not be asked for later; leave the field out",
                param="background",
                code="unsupported_parameter",
            )
        name = meant or self._meant(head.model, tenant, (endpoint, fields))
        model, adapter = self._model(name, tenant)
        salt = head.salt
        priority = _priority(incoming.get(headers.PRIORITY), tenant)
        new: dict[str, str | int] = {}
        if name is not None and name != head.model:
            new["model"] = name
        if self._isolation is not None and (tenant.is_isolated or (salt and self._isolation.has_secret)):
            salt = self._isolation.salt(tenant, salt)
            new["cache_salt"] = salt
        # Engines take it at OpenAI's endpoints only.
        has_priority = endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)
        if self._engine_priority is not None and has_priority and (priority or "priority" in fields):
            new["priority"] = self._engine_priority * priority
        if new:
            body = with_fields(body, fields, new)
        estimate = self._estimates.of(model)
        is_ids = endpoint is Endpoint.COMPLETIONS and _is_token_ids(fields.get("prompt"))
        tokens_per_byte = 1 / TOKEN_ID_BYTES if is_ids else estimate.tokens_per_byte
        size, media = len(head.canonical), head.media_parts
        media_tokens = media * (MEDIA_TOKENS - MEDIA_BYTES * tokens_per_byte)  # beyond what their canonical bytes make
        prompt_tokens = (size + head.further_bytes) * tokens_per_byte + media_tokens
        return Inbound(
            endpoint=endpoint,
            model=model,
            stream=head.stream,
            policy=policy,
            keys=prefix_keys(head.canonical, key_seed(model, adapter, salt), self._stride),
            prompt_bytes=size,
            prompt_tokens=max(1, round(prompt_tokens)),
            tokens_per_stride=self._stride * (prompt_tokens / size if media else tokens_per_byte),
            output_tokens=1 if endpoint is Endpoint.COUNT_TOKENS else _expected_output(fields, estimate.output_tokens),
            teaches_tokens=not media and (endpoint in _CHATS or isinstance(fields.get("prompt"), str)),
            body=body,
            prompts=head.prompts,
            priority=priority,
            ttft_slo_s=_ttft_slo_s(incoming.get(headers.TTFT_SLO)),
            session=session_of(incoming, fields, tenant.name),
            continues=kept_by_engine(fields) if is_response else None,
            stores=is_response and fields.get("store") is not False,
            is_named=name is not None and name != head.model,
        )

    def read_by_load(self, path: str, body: bytes, incoming: Mapping[str, str], tenant: Tenant = DEFAULT) -> Inbound:
        """The request of `tenant` to a path whose requests have no keys. It is as long as its body."""
        policy, fields = self._policy(incoming.get(headers.POLICY)), parse_body(body)
        asked = asked_model(fields, is_required=path not in BY_LOAD)
        name = self._meant(asked, tenant, body)
        model, _ = self._model(name, tenant)
        new: dict[str, str | int] = {}
        if name is not None and name != asked:
            new["model"] = name
        if self._isolation is not None and tenant.is_isolated and path not in FREE:
            new["cache_salt"] = self._isolation.salt(tenant, "")
        estimate = self._estimates.of(model)
        prompt_tokens = 1 if path in FREE else max(1, round(len(body) * estimate.tokens_per_byte))
        return Inbound(
            endpoint=path,
            model=model,
            stream=False,
            policy=policy,
            keys=(),
            prompt_bytes=0,
            prompt_tokens=prompt_tokens,
            tokens_per_stride=self._stride * estimate.tokens_per_byte,
            output_tokens=max(1, round(estimate.output_tokens)) if path in LONG else 1,
            teaches_tokens=False,
            body=with_fields(body, fields, new) if new else body,
            priority=_priority(incoming.get(headers.PRIORITY), tenant),
            ttft_slo_s=_ttft_slo_s(incoming.get(headers.TTFT_SLO)),
            session=session_of(incoming, fields, tenant.name),
            is_by_load=True,
        )

    def _policy(self, asked: str | None) -> str:
        if asked is None:
            return self._default_policy
        if self._policies is None:
            raise BadRequest(
                f"the header {headers.POLICY} is not allowed here: start the gateway with --allow-policy-header",
                param=headers.POLICY,
            )
        if asked not in self._policies:
            raise BadRequest(
                f"{headers.POLICY}: unknown policy {quoted(asked)}; known: {', '.join(sorted(self._policies))}",
                param=headers.POLICY,
            )
        return asked

    def _meant(
        self, asked: str | None, tenant: Tenant, words: bytes | tuple[Endpoint, Mapping[str, Any]]
    ) -> str | None:
        """The name that engines are asked for. `words`: what tells the conversation from others, or where it is.

        Raises Forbidden: the tenant has to be allowed the name that it asks for and the one that this stands for.
        """
        name = self._names.default if asked is None else asked
        if name is None or name not in self._names:
            return name
        check_allowed(tenant, name)
        known = words if isinstance(words, bytes) else first_words(*words)
        return self._names.model(name, tenant, self._is_served, known)

    def _is_served(self, name: str) -> bool:
        return bool(self._fleet.pods(name) or self._fleet.pods(name.rpartition(":")[0]))

    def _model(self, name: str | None, tenant: Tenant) -> tuple[str, str]:
        """The names of the model and of the adapter on it, empty without one.

        SGLang is asked for `model:adapter` and does not list that; other engines list each adapter as a model. An
        adapter that does not exist is for the engine to refuse.
        """
        if name is not None:
            check_allowed(tenant, name)
            base, _, adapter = name.rpartition(":")
            if adapter and not self._is_known(name) and self._is_known(base):
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
            known = ", ".join(sorted(allowed)) or "none that this API key may use is served"
            raise BadRequest(f"model is required, one of: {known}", param="model")
        return allowed[0], ""

    def _is_known(self, name: str) -> bool:
        return name in self._fleet.models() or self._fleet.is_known(name)


def check_allowed(tenant: Tenant, name: str) -> None:
    """Raises Forbidden if the tenant may not ask for that name; whether there is such a model is not told."""
    if not tenant.may_use(name):
        raise not_allowed(name)


def find_model(fleet: Fleet, name: str, tenant: Tenant = DEFAULT) -> ServedModel:
    """The model of that name. Raises ModelNotFound, or Unavailable for one that no engine serves at the moment."""
    known = fleet.models()
    if name in known:
        return known[name]
    if fleet.is_known(name):
        raise NoEngine(name, retry_after_s=SCALING_RETRY_AFTER_S)
    if not known:
        raise Unavailable("no engine has answered yet", retry_after_s=RETRY_AFTER_S)
    names = ", ".join(sorted(filter(tenant.may_use, known)))
    raise ModelNotFound(f"model {quoted(name)} does not exist; known: {names}", param="model", code="model_not_found")


def _priority(asked: str | None, tenant: Tenant) -> int:
    """Raises BadRequest, naming the header, for what is no number that the tenant may use."""
    if asked is None:
        return 0
    if _NUMBER.fullmatch(asked) is None or not LOWEST_PRIORITY <= int(asked) <= tenant.highest_priority:
        raise BadRequest(
            f"{headers.PRIORITY} must be a whole number from {LOWEST_PRIORITY} to {tenant.highest_priority}, the most "
            f"urgent that this client may ask for, got {quoted(asked)}",
            param=headers.PRIORITY,
        )
    return int(asked)


def _ttft_slo_s(asked: str | None) -> float | None:
    """Raises BadRequest, naming the header, for what is no number of milliseconds."""
    if asked is None:
        return None
    if _NUMBER.fullmatch(asked) is None or int(asked) < 1:
        raise BadRequest(
            f"{headers.TTFT_SLO} must be a whole number of milliseconds from 1 to 999999, got {quoted(asked)}",
            param=headers.TTFT_SLO,
        )
    return int(asked) / 1000


def _endpoint_of(fields: Mapping[str, Any]) -> Endpoint:
    """The generating endpoint that a body is for. A chat without a system text may be for either of two: its keys are
    the same there."""
    if "messages" not in fields:
        return Endpoint.RESPONSES if "input" in fields else Endpoint.COMPLETIONS
    return Endpoint.MESSAGES if "system" in fields else Endpoint.CHAT


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def _expected_output(fields: Mapping[str, Any], learnt_tokens: float) -> int:
    limits = [value for value in [fields.get(name) for name in _LIMITS] if isinstance(value, int) and value > 0]
    return max(1, min([round(learnt_tokens), *limits]))
