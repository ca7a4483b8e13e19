"""A generating request, read once: what choosing a pod needs, beside the bytes that are forwarded as they came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.contract import headers
from engine.contract.errors import BadRequest, ModelNotFound, Unavailable
from engine.contract.keys import MEDIA_BYTES, PrefixKey, key_seed, prefix_keys
from engine.contract.requests import TOKEN_ID_BYTES, Endpoint, parse_body, request_head
from router.fleet.fleet import Fleet
from router.fleet.probe import ServedModel
from router.gateway.errors import NoEngine
from router.gateway.estimates import Estimates

MEDIA_TOKENS = 1024
"""Prompt tokens of an image, a sound or a file, whose bytes say nothing of them. Engines make 576 of an image for LLaVA
1.5, 256 to 1,280 for Qwen2-VL with the bounds its authors advise, 4,096 of a megapixel for Pixtral."""
RETRY_AFTER_S = 1.0
SCALING_RETRY_AFTER_S = 5.0
"""For a model without a single engine: one that starts takes a while."""


@dataclass(slots=True)
class Inbound:
    """A request the gateway accepted. Bytes are canonical bytes (DESIGN "Prefix keys"), not the body's.

    Never changed; not frozen because freezing costs a microsecond. So with the other values made for every request.
    """

    endpoint: Endpoint
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
    prompts: int = 1
    """`keys` and `prompt_bytes` are the first one's."""


class Reader:
    """Turns bodies into Inbound. Raises BadRequest, ModelNotFound or Unavailable, naming the field."""

    def __init__(
        self, fleet: Fleet, estimates: Estimates, *, stride: int, default_policy: str, policies: frozenset[str] | None
    ) -> None:
        """`policies`: names a request may choose from by header; None: it may not."""
        self._fleet = fleet
        self._estimates = estimates
        self._stride = stride
        self._default_policy = default_policy
        self._policies = policies

    def read(self, endpoint: Endpoint | None, body: bytes, incoming: Mapping[str, str]) -> Inbound:
        """The request in `body`; without an endpoint, the one that the body's fields belong to."""
        policy = self._policy(incoming.get(headers.POLICY))
        fields = parse_body(body)
        if endpoint is None:
            endpoint = Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS
        head = request_head(endpoint, fields)
        model, adapter = self._model(head.model)
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
            keys=prefix_keys(head.canonical, key_seed(model, adapter, head.salt), self._stride),
            prompt_bytes=size,
            prompt_tokens=max(1, round(prompt_tokens)),
            tokens_per_stride=self._stride * (prompt_tokens / size if media else tokens_per_byte),
            output_tokens=_expected_output(fields, estimate.output_tokens),
            teaches_tokens=not media and (endpoint is Endpoint.CHAT or isinstance(fields.get("prompt"), str)),
            body=body,
            prompts=head.prompts,
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
                f"{headers.POLICY}: unknown policy {asked!r}; known: {', '.join(sorted(self._policies))}",
                param=headers.POLICY,
            )
        return asked

    def _model(self, name: str | None) -> tuple[str, str]:
        """The names of the model and of the adapter on it, empty without one.

        SGLang is asked for `model:adapter` and does not list that; other engines list each adapter as a model. An
        adapter that does not exist is for the engine to refuse.
        """
        if name is not None:
            base, _, adapter = name.rpartition(":")
            if adapter and not self._is_known(name) and self._is_known(base):
                return find_model(self._fleet, base).name, adapter
            return find_model(self._fleet, name).name, ""
        known = self._fleet.models()
        if not known:
            raise Unavailable("no engine has answered yet", retry_after_s=RETRY_AFTER_S)
        if len(known) > 1:
            raise BadRequest(f"model is required, one of: {', '.join(sorted(known))}", param="model")
        return next(iter(known)), ""

    def _is_known(self, name: str) -> bool:
        return name in self._fleet.models() or self._fleet.is_known(name)


def find_model(fleet: Fleet, name: str) -> ServedModel:
    """The model of that name. Raises ModelNotFound, or Unavailable for one that no engine serves at the moment."""
    known = fleet.models()
    if name in known:
        return known[name]
    if fleet.is_known(name):
        raise NoEngine(name, retry_after_s=SCALING_RETRY_AFTER_S)
    if not known:
        raise Unavailable("no engine has answered yet", retry_after_s=RETRY_AFTER_S)
    raise ModelNotFound(
        f"model {name!r} does not exist; known: {', '.join(sorted(known))}", param="model", code="model_not_found"
    )


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def _expected_output(fields: Mapping[str, Any], learnt_tokens: float) -> int:
    limits = [
        value
        for value in (fields.get("max_completion_tokens"), fields.get("max_tokens"))
        if isinstance(value, int) and value > 0
    ]
    return max(1, min([round(learnt_tokens), *limits]))
