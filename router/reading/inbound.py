"""Read a request once: the facts needed to choose a pod, and the bytes to forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from multidict import istr
from xxhash import xxh3_64_intdigest

from engine.contract import headers
from engine.contract.errors import BadRequest, quoted
from engine.contract.keys import MEDIA_BYTES, PrefixKey, key_seed, prefix_keys
from engine.contract.requests import TOKEN_ID_BYTES, Endpoint, RequestHead, parse_body, request_head
from engine.contract.responses import kept_by_engine
from router.reading.by_load import AUDIO_TOKEN_BYTES, BY_LOAD, FREE, LONG, asked_model
from router.reading.engine_fields import without_effect
from router.reading.fields import body_of, with_fields
from router.reading.model_ratios import ModelEstimate
from router.reading.named_cache import FIELD, NamesCache, StoredCache
from router.reading.names import first_words
from router.reading.upload import Upload
from router.tenants.marks import marked
from router.tenants.tenant import DEFAULT, Tenant
from router.views.types import PodId

MEDIA_TOKENS = 1024
"""Prompt tokens of an image, a sound or a file, whose size in bytes says nothing about their number. An image becomes
576 tokens in LLaVA 1.5, and 256 to 1,280 in Qwen2-VL with its authors' bounds. A megapixel becomes 4,096 in Pixtral."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_OPENAI = (Endpoint.CHAT, Endpoint.COMPLETIONS)
_CHATS = (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES)
SESSION_FIELDS = tuple(map(istr, (headers.SESSION, "x-session-affinity", "x-claude-code-session-id", "session_id")))
"""Header fields with the session: the one of vLLM and the gateway, those of proxies that pin sessions, of Claude Code
and of Codex. The first one present counts. An `istr` is looked up without converting it to lower case each time."""
BODY_FIELD = "prompt_cache_key"
"""The session in the body, for the gateway alone: no engine reads the field."""
ENGINE_SESSION = "session_id"
"""The session in the body that vLLM and SGLang read."""
CONVERSATION = "conversation"
MAX_SESSION_CHARS = 512
"""A longer name is ignored."""
LOWEST_PRIORITY = -9
"""Lowest priority of a request. Requests below 0 are the first to be refused under overload."""
_NUMBER = re.compile(r"-?[0-9]{1,6}")


@dataclass(slots=True)
class Inbound:
    """A request that the gateway accepted. Bytes are canonical bytes (engine/contract/PREFIX_KEYS.md), not the body's.

    Never changed, but not frozen, since freezing costs a microsecond. The same holds for all objects made per request.
    """

    endpoint: str
    """The path: an `Endpoint`, or another path whose pods are chosen by load."""
    model: str
    """The model that is served, without the name of an adapter on it."""
    stream: bool
    policy: str
    keys: tuple[PrefixKey, ...]
    prompt_bytes: int
    prompt_tokens: int
    """Tokens of all prompts, estimated; exact for token ids."""
    tokens_per_stride: float
    output_tokens: int
    """Expected length of one answer."""
    teaches_tokens: bool
    """Whether the answer's token count shows how many tokens this model makes of a byte of text."""
    body: bytes
    """The body as it came, except for `model` if the client used another name for it, `cache_salt` if the gateway makes
    salts, and `priority` if engines get it."""
    prompts: int = 1
    """Number of prompts; `keys` and `prompt_bytes` are those of the first."""
    is_rest: bool = False
    """Whether it asks for the rest of a stream that broke."""
    answers: int = 1
    """Number of answers that it asks for; each prompt has one or several."""
    priority: int = 0
    """Higher is served sooner."""
    ttft_slo_s: float | None = None
    """Seconds in which the client wants the first token."""
    continues: tuple[str, str] | None = None
    """The conversation that an engine keeps and the request continues: the field that names it, and the id there."""
    stores: bool = False
    """Whether the engine is to keep the answer for a later request."""
    session: int = 0
    """The client's session as a number (see `session_of`); 0 without one."""
    is_by_load: bool = False
    """Whether the request has no prefix to cache, so its answer tells nothing about caches."""
    is_named: bool = False
    """Whether the client asked by one of the operator's names, which stands for `model`."""
    only: PodId | None = None
    """The only pod that the request can go to; None: any."""
    upload: Upload | None = None
    """The body, if it is sent to the engine as it comes; `body` is then the beginning of the file."""
    dropped: Sequence[str] = ()
    """Fields of the client's body that engines do not get (see `engine_fields.py`)."""
    resource: tuple[str, str] | None = None
    """Method, and path with query, if the request is not a POST to `endpoint`."""

    @property
    def answer_tokens(self) -> int:
        """Expected tokens of all answers together."""
        return self.answers * self.output_tokens


inbound_by_load = partial(Inbound, stream=False, keys=(), prompt_bytes=0, teaches_tokens=False, is_by_load=True)
"""Makes an Inbound without a prefix to cache."""


class ModelNames(Protocol):
    """What a Reader asks about models: see `names.Models`."""

    def only_model(self, tenant: Tenant) -> str | None:
        """See Models."""
        ...

    def meant(self, asked: str | None, tenant: Tenant, words: Callable[[], bytes]) -> str | None:
        """See Models."""
        ...

    def find(self, name: str | None, tenant: Tenant) -> tuple[str, str]:
        """See Models."""
        ...


class ModelEstimates(Protocol):
    """What a Reader asks about tokens: see `model_ratios.Estimates`."""

    def of(self, model: str) -> ModelEstimate:
        """See Estimates."""
        ...


class Salts(Protocol):
    """What a Reader asks about salts: see `tenants.isolation.Isolation`."""

    @property
    def has_secret(self) -> bool:
        """See Isolation."""
        ...

    def salt(self, tenant: Tenant, own_salt: str) -> str:
        """See Isolation."""
        ...


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests are read, by the operator's settings."""

    stride_bytes: int
    default_policy: str
    policies: frozenset[str] | None
    """Names that a request may choose from by header; None: it may not."""
    engine_priority: Literal[-1, 1] | None = None
    """Sign of the field `priority` that engines get, 1 if they serve a higher one sooner; None: the gateway does not
    set it."""


class Reader:
    """Turns bodies into Inbound. Raises BadRequest, ModelNotFound or Unavailable, naming the field."""

    def __init__(
        self,
        models: ModelNames,
        estimates: ModelEstimates,
        isolation: Salts | None,
        rules: Rules,
    ) -> None:
        """`isolation`: tenants' salts; None: clients' salts reach engines."""
        self._models = models
        self._estimates = estimates
        self._isolation = isolation
        self._rules = rules
        self._stride = rules.stride_bytes
        self._engine_priority = rules.engine_priority

    def read(
        self,
        endpoint: Endpoint | None,
        body: bytes,
        incoming: Mapping[str, str],
        tenant: Tenant = DEFAULT,
        meant: str | None = None,
        priority: int | None = None,
        cache: StoredCache | None = None,
    ) -> Inbound:
        """Return the request of `tenant` in `body`. `endpoint`: None to infer it from the body's fields. `meant`: the
        model that a name in the body stands for, if that is known already. `cache`: the named cache in the body.

        Raises NamesCache if the body names a cache that is not given.
        """
        policy = self._policy(incoming.get(headers.POLICY))
        fields = parse_body(body)
        if endpoint is None:
            endpoint = endpoint_of(fields)
        if FIELD in fields:
            body, fields = _with_cache(endpoint, fields, cache)
        head = request_head(endpoint, fields)
        name = meant or self._models.meant(head.model, tenant, partial(first_words, endpoint, fields))
        model, adapter = self._models.find(name, tenant)
        asked_priority = _priority(incoming.get(headers.PRIORITY), tenant)
        priority = asked_priority if priority is None else priority
        dropped = self._dropped(endpoint, fields, tenant)
        new, salt = self._new_fields(endpoint, fields, head, name, tenant, priority)
        if new or dropped:
            body = with_fields(body, fields, new, dropped)
        estimate = self._estimates.of(model)
        is_ids = endpoint is Endpoint.COMPLETIONS and _is_token_ids(fields.get("prompt"))
        tokens_per_byte = 1 / TOKEN_ID_BYTES if is_ids else estimate.tokens_per_byte
        size, media = len(head.canonical), head.media_parts
        media_tokens = media * (MEDIA_TOKENS - MEDIA_BYTES * tokens_per_byte)  # `size` counts MEDIA_BYTES of each
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
            answers=head.prompts * _answers(fields) if endpoint in _OPENAI else 1,
            priority=priority,
            ttft_slo_s=_ttft_slo_s(incoming.get(headers.TTFT_SLO)),
            session=session_of(incoming, fields, tenant.name),
            continues=_continued(endpoint, fields, tenant),
            stores=endpoint is Endpoint.RESPONSES and fields.get("store") is not False,
            is_named=name is not None and name != head.model,
            dropped=dropped,
        )

    def _dropped(self, endpoint: str, fields: Mapping[str, Any], tenant: Tenant) -> Sequence[str]:
        """Return the fields that engines do not get. Raises FieldRefused.

        Engines get a priority from the gateway or none from a tenant, who would choose it against other tenants.
        """
        dropped = without_effect(fields)
        if fields.get("priority") is None or (self._engine_priority is not None and endpoint in _OPENAI):
            return dropped
        is_between_tenants = tenant.name != DEFAULT.name or self._engine_priority is not None
        return [*dropped, "priority"] if is_between_tenants else dropped

    def _new_fields(
        self,
        endpoint: Endpoint,
        fields: Mapping[str, Any],
        head: RequestHead,
        name: str | None,
        tenant: Tenant,
        priority: int,
    ) -> tuple[dict[str, Any], str]:
        """Return the fields that engines get in place of the client's, and the salt. `name`: the model that the request
        means."""
        new: dict[str, Any] = _own_names(endpoint, fields, tenant)
        if name is not None and name != head.model:
            new["model"] = name
        salt = head.salt
        if (own_salt := self._salt(tenant, salt)) is not None:
            salt = new["cache_salt"] = own_salt
        # Engines accept `priority` and `n` only at OpenAI's endpoints.
        if self._engine_priority is not None and endpoint in _OPENAI and (priority or "priority" in fields):
            new["priority"] = self._engine_priority * priority
        return new, salt

    def read_by_load(
        self,
        path: str,
        body: bytes,
        incoming: Mapping[str, str],
        tenant: Tenant = DEFAULT,
        priority: int | None = None,
    ) -> Inbound:
        """Return the request of `tenant` to a path whose requests have no keys. The body's length gives its tokens."""
        asked_priority = _priority(incoming.get(headers.PRIORITY), tenant)
        policy, fields = self._policy(incoming.get(headers.POLICY)), parse_body(body)
        asked = asked_model(fields, is_required=path not in BY_LOAD)
        name = self._models.meant(asked, tenant, lambda: body)
        model, _ = self._models.find(name, tenant)
        dropped = self._dropped(path, fields, tenant)
        new: dict[str, Any] = _own_names(path, fields, tenant)
        if name is not None and name != asked:
            new["model"] = name
        if path not in FREE and (salt := self._salt(tenant, fields.get("cache_salt"))) is not None:
            new["cache_salt"] = salt
        estimate = self._estimates.of(model)
        prompt_tokens = 1 if path in FREE else max(1, round(len(body) * estimate.tokens_per_byte))
        return inbound_by_load(
            endpoint=path,
            model=model,
            policy=policy,
            prompt_tokens=prompt_tokens,
            tokens_per_stride=self._stride * estimate.tokens_per_byte,
            output_tokens=max(1, round(estimate.output_tokens)) if path in LONG else 1,
            body=with_fields(body, fields, new, dropped) if new or dropped else body,
            dropped=dropped,
            priority=asked_priority if priority is None else priority,
            ttft_slo_s=_ttft_slo_s(incoming.get(headers.TTFT_SLO)),
            session=session_of(incoming, fields, tenant.name),
        )

    def read_upload(
        self, path: str, upload: Upload, size: int, incoming: Mapping[str, str], tenant: Tenant = DEFAULT
    ) -> Inbound:
        """Return the request of `tenant` with a form of about `size` bytes, once enough has come to choose a pod."""
        policy, words = self._policy(incoming.get(headers.POLICY)), upload.sample
        asked = upload.model or None
        only = self._models.only_model(tenant) if asked is None else None
        name = only or self._models.meant(asked, tenant, lambda: words)
        model, _ = self._models.find(name, tenant)

        def check(late: str) -> None:
            meant = self._models.meant(late or None, tenant, lambda: words)
            if self._models.find(meant, tenant)[0] != model or (meant or model) != (name or model):
                raise BadRequest(
                    f"model is {quoted(late)}, and the upload has begun for {quoted(name or model)}: put the field "
                    "model before the file in the form",
                    param="model",
                )

        upload.begin(name or model, check)
        estimate = self._estimates.of(model)
        return inbound_by_load(
            endpoint=path,
            model=model,
            policy=policy,
            prompt_tokens=max(1, round(size / AUDIO_TOKEN_BYTES)),
            tokens_per_stride=self._stride * estimate.tokens_per_byte,
            output_tokens=max(1, round(estimate.output_tokens)),
            body=words,
            priority=_priority(incoming.get(headers.PRIORITY), tenant),
            ttft_slo_s=_ttft_slo_s(incoming.get(headers.TTFT_SLO)),
            session=session_of(incoming, {}, tenant.name),
            upload=upload,
        )

    def _salt(self, tenant: Tenant, asked: object) -> str | None:
        """Return the salt that engines get for a request of `tenant` asking for the salt `asked`; None: keep `asked`.
        Raises BadRequest if `asked` is no text."""
        if self._isolation is None or not (tenant.is_isolated or (asked and self._isolation.has_secret)):
            return None
        if not isinstance(asked, str | None):
            raise BadRequest("cache_salt must be a string", param="cache_salt")
        return self._isolation.salt(tenant, asked or "")

    def _policy(self, asked: str | None) -> str:
        if asked is None:
            return self._rules.default_policy
        policies = self._rules.policies
        if policies is None:
            raise BadRequest(
                f"the header {headers.POLICY} is not allowed here: start the gateway with --allow-policy-header",
                param=headers.POLICY,
            )
        if asked not in policies:
            raise BadRequest(
                f"{headers.POLICY}: unknown policy {quoted(asked)}; known: {', '.join(sorted(policies))}",
                param=headers.POLICY,
            )
        return asked


def _with_cache(endpoint: Endpoint, fields: dict[str, Any], cache: StoredCache | None) -> tuple[bytes, dict[str, Any]]:
    """Return the body that engines get instead of one that has the field of a named cache, and its fields."""
    if fields[FIELD] is None:
        del fields[FIELD]  # no cache, and engines do not know the field
        return body_of(fields), fields
    if cache is None:
        raise NamesCache(endpoint, fields[FIELD])
    body = cache.expand(endpoint, fields)
    return body, parse_body(body)


def _own_names(endpoint: str, fields: Mapping[str, Any], tenant: Tenant) -> dict[str, Any]:
    """Return the fields with names that the client chose, if engines get other names for them."""
    new: dict[str, Any] = {}
    if (continued := _continued(endpoint, fields, tenant)) is not None:
        field, name = continued
        given = fields[field]
        if field == CONVERSATION and name != (given if isinstance(given, str) else given["id"]):
            new[field] = name if isinstance(given, str) else {"id": name}
    session = fields.get(ENGINE_SESSION)
    if isinstance(session, str) and (name := marked(tenant.name, session)) != session:
        new[ENGINE_SESSION] = name
    return new


def _continued(endpoint: str, fields: Mapping[str, Any], tenant: Tenant) -> tuple[str, str] | None:
    """Return the conversation that the request continues, by the engines' name. Raises BadRequest for an invalid id."""
    if endpoint != Endpoint.RESPONSES:
        return None
    kept = kept_by_engine(fields)
    if kept is None or kept[0] != CONVERSATION:
        return kept
    return CONVERSATION, marked(tenant.name, kept[1])


def _priority(asked: str | None, tenant: Tenant) -> int:
    """Return the priority. Raises BadRequest, naming the header, if it is no number that the tenant may use."""
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
    """Return the wanted time to the first token in seconds. Raises BadRequest, naming the header, if it is invalid."""
    if asked is None:
        return None
    if _NUMBER.fullmatch(asked) is None or int(asked) < 1:
        raise BadRequest(
            f"{headers.TTFT_SLO} must be a whole number of milliseconds from 1 to 999999, got {quoted(asked)}",
            param=headers.TTFT_SLO,
        )
    return int(asked) / 1000


def endpoint_of(fields: Mapping[str, Any]) -> Endpoint:
    """Return the generating endpoint of a body. A chat without a system text fits two endpoints, with equal keys."""
    if "messages" not in fields:
        return Endpoint.RESPONSES if "input" in fields else Endpoint.COMPLETIONS
    return Endpoint.MESSAGES if "system" in fields else Endpoint.CHAT


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def _answers(fields: Mapping[str, Any]) -> int:
    """Return the answers to each prompt. Of `best_of` answers the client gets the `n` best, but all are computed."""
    return max([1, *[value for name in ("n", "best_of") if type(value := fields.get(name)) is int]])


def _expected_output(fields: Mapping[str, Any], learnt_tokens: float) -> int:
    limits = [value for value in [fields.get(name) for name in _LIMITS] if isinstance(value, int) and value > 0]
    return max(1, min([round(learnt_tokens), *limits]))


def session_of(incoming: Mapping[str, str], fields: Mapping[str, Any], tenant: str) -> int:
    """Return the session as a number from 1 to 2**64 - 1 that no two tenants share; 0 without a session."""
    for field in SESSION_FIELDS:
        if field in incoming:
            return _session_number(incoming[field], tenant)
    return _session_number(fields[BODY_FIELD], tenant) if BODY_FIELD in fields else 0


def _session_number(name: object, tenant: str) -> int:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SESSION_CHARS:
        return 0
    return xxh3_64_intdigest(f"{tenant}\x1f{name}".encode(errors="surrogatepass")) or 1
