"""A named cache: the beginning of a prompt that a client stores once and then names. Pure.

A named cache is a definition, not KV. The gateway puts its contents in front of a request that names it. So the
request's prefix keys lead to a pod that has the KV, and any other pod computes the KV anew. The fields are those of
Gemini's API, the contents those of the chat APIs. Their meaning: https://ai.google.dev/api/caching
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from engine.contract.bounded_json import loads
from engine.contract.errors import BadRequest, quoted
from engine.contract.messages import CACHE_CONTROL
from engine.contract.requests import MAX_LISTED, Endpoint
from router.edge.errors import TooLarge
from router.reading.fields import body_of

FIELD = "cached_content"
"""Field of a request that names the cache it begins with."""
PREFIX = "caches/"
DEFAULT_TTL_S = 3600.0
MAX_DISPLAY_CHARS = 128
MAX_MARKS = 4
"""Most `cache_control` marks that a request may have."""
SHORT_S = 300.0
"""The shorter lifetime of a mark, in seconds; the longer one is an hour."""
_ENDPOINTS = (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)
_CONTENTS = ("system", "messages", "tools")
_TIMES = {"ttl": "ttl", "expireTime": "expire_time", "expire_time": "expire_time"}
_ID = re.compile(r"[0-9a-f]{32}")
_TTL = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)s")
_TEXTS = (str, list)


@dataclass(frozen=True, slots=True)
class CacheMeta:
    """All of a named cache except its contents. Times are in seconds since 1970."""

    id: str
    model: str
    display_name: str
    created_s: float
    updated_s: float
    until_s: float
    size: int
    """Bytes of the contents."""
    tokens: int
    """Tokens of the contents, estimated from their bytes."""

    def shown(self) -> dict[str, Any]:
        """Return the metadata as clients see it."""
        name = {"displayName": self.display_name} if self.display_name else {}
        return {
            "name": PREFIX + self.id,
            "model": self.model,
            **name,
            "createTime": _time(self.created_s),
            "updateTime": _time(self.updated_s),
            "expireTime": _time(self.until_s),
            "usageMetadata": {"totalTokenCount": self.tokens},
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """A cache that a client asks to store."""

    model: str
    display_name: str
    until_s: float
    contents: bytes
    """JSON object with those of `system`, `messages` and `tools` that were given."""


@dataclass(frozen=True, slots=True)
class StoredCache:
    """A named cache, to be put in front of one request."""

    meta: CacheMeta
    contents: bytes
    """See Wanted."""
    mark_s: float | None
    """If given, ask the engine to keep the contents about that many seconds."""
    max_body_bytes: int
    """Most bytes of the request with the contents."""

    def expand(self, endpoint: Endpoint, fields: Mapping[str, Any]) -> bytes:
        """Return the body that engines get for `fields`. Raises BadRequest if the request cannot begin with this cache,
        and TooLarge."""
        made = expanded(endpoint, fields, self.meta, loads(self.contents), mark_s=self.mark_s)
        if len(made) > self.max_body_bytes:
            raise TooLarge(
                f"with the contents of {PREFIX}{self.meta.id} the request body has {len(made)} bytes; at most "
                f"{self.max_body_bytes} are allowed",
                param=FIELD,
            )
        return made


class NamesCache(BadRequest):
    """The request begins with a named cache. The caller puts the contents in front, or refuses the request."""

    def __init__(self, endpoint: Endpoint, name: object) -> None:
        """`name`: the value of FIELD."""
        super().__init__(f"{FIELD} is not read here: send the whole request", param=FIELD)
        self.endpoint = endpoint
        self.name = name


def new_id() -> str:
    """Return an id of 128 random bits, so nobody can guess another tenant's."""
    return secrets.token_hex(16)


def id_of(name: object, param: str = FIELD) -> str:
    """Return the id in `caches/ID`. Raises BadRequest if `name` is not the name of a cache."""
    if not isinstance(name, str) or not name.startswith(PREFIX):
        raise BadRequest(f"{param} must be the name of a cache, such as 'caches/5f2b...'", param=param)
    return name.removeprefix(PREFIX)


def is_id(text: str) -> bool:
    """Whether a cache can have this id."""
    return _ID.fullmatch(text) is not None


def parse_new(fields: Mapping[str, Any], now_s: float, max_ttl_s: float) -> Wanted:
    """Return what the body of a POST asks to store. Raises BadRequest, naming the field at fault."""
    _check_names(fields, {"model", "displayName", "display_name", *_CONTENTS, *_TIMES})
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model is required: contents are stored for one model", param="model")
    display = fields.get("displayName", fields.get("display_name")) or ""
    if not isinstance(display, str) or len(display) > MAX_DISPLAY_CHARS:
        raise BadRequest(f"displayName must be a text of at most {MAX_DISPLAY_CHARS} characters", param="displayName")
    contents = {name: fields[name] for name in _CONTENTS if fields.get(name)}
    if not contents:
        raise BadRequest("there is nothing to store: give messages, system or tools", param="messages")
    for name in ("messages", "tools"):
        listed = contents.get(name, [])
        if not isinstance(listed, list) or len(listed) > MAX_LISTED or not all(isinstance(one, dict) for one in listed):
            raise BadRequest(f"{name} must be a list of at most {MAX_LISTED} objects", param=name)
    if not isinstance(contents.get("system", ""), _TEXTS):
        raise BadRequest("system must be a text or a list of text blocks", param="system")
    for i, message in enumerate(contents.get("messages", [])):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}].role must be a string such as 'user'", param=f"messages[{i}].role")
    until_s = parse_expiry(fields, now_s, max_ttl_s)
    return Wanted(model, display, now_s + DEFAULT_TTL_S if until_s is None else until_s, body_of(contents))


def parse_renewal(fields: Mapping[str, Any], now_s: float, max_ttl_s: float) -> float:
    """Return the time until which a PATCH's body asks to keep a cache. Raises BadRequest for any other change."""
    _check_names(fields, _TIMES)
    until_s = parse_expiry(fields, now_s, max_ttl_s)
    if until_s is None:
        raise BadRequest("ttl or expireTime is required: nothing else of a cache can be changed", param="ttl")
    return until_s


def parse_expiry(fields: Mapping[str, Any], now_s: float, max_ttl_s: float) -> float | None:
    """Return the time until which a body asks to keep a cache; None if it does not say. Raises BadRequest."""
    given = {_TIMES[name]: value for name, value in fields.items() if name in _TIMES and value is not None}
    if len(given) > 1:
        raise BadRequest("give ttl or expireTime, not both", param="ttl")
    if "ttl" in given:
        matched = _TTL.fullmatch(given["ttl"]) if isinstance(given["ttl"], str) else None
        if matched is None or not 0 < float(matched[1]) <= max_ttl_s:
            shown = quoted(str(given["ttl"]))
            raise BadRequest(
                f"ttl must be seconds above 0 and at most {max_ttl_s:g}, such as '300s'; got {shown}", param="ttl"
            )
        return now_s + float(matched[1])
    if "expire_time" not in given:
        return None
    until_s = _seconds(given["expire_time"])
    if until_s is None or not now_s < until_s <= now_s + max_ttl_s:
        raise BadRequest(
            f"expireTime must be in the future, within {max_ttl_s:g} s, such as '2026-01-31T12:00:00Z'; "
            f"got {quoted(str(given['expire_time']))}",
            param="expireTime",
        )
    return until_s


def expanded(
    endpoint: Endpoint,
    fields: Mapping[str, Any],
    meta: CacheMeta,
    contents: Mapping[str, Any],
    *,
    mark_s: float | None = None,
) -> bytes:
    """Return the body with the contents in front of the request's own messages, and without the name of the cache.

    `mark_s`: the cache's remaining life, in seconds; if given, ask the engine to keep the contents about that long.
    Raises BadRequest if the request cannot begin with this cache.
    """
    if endpoint not in _ENDPOINTS:
        raise BadRequest(f"{FIELD} is for chats and messages, and not for {endpoint}", param=FIELD)
    for name in ("system", "tools"):
        if fields.get(name):
            raise BadRequest(
                f"{name} cannot be given together with {FIELD}: store it in the cache, in front of the messages",
                param=name,
            )
    if fields.get("model") not in (None, meta.model):
        raise BadRequest(
            f"model must be {quoted(meta.model)}, for which the cache was made, or be left out", param="model"
        )
    own = fields.get("messages")
    if not isinstance(own, list) or not own:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    stored = dict(contents)
    if mark_s is not None:
        ttl = "1h" if mark_s > SHORT_S else "5m"
        stored = _marked(stored, {"type": "ephemeral", "ttl": ttl})
    messages = [*stored.get("messages", ()), *own]
    made = {name: value for name, value in fields.items() if name not in (FIELD, "messages", "system", "tools")}
    made["model"] = meta.model
    if "tools" in stored:
        made["tools"] = stored["tools"]
    if "system" in stored and endpoint is Endpoint.CHAT:
        messages.insert(0, {"role": "system", "content": stored["system"]})
    elif "system" in stored:
        made["system"] = stored["system"]
    made["messages"] = messages
    return body_of(made)


def _marked(contents: dict[str, Any], mark: Mapping[str, str]) -> dict[str, Any]:
    """Return the contents, with a `cache_control` mark for engines on the last part, if that is a text or a tool."""
    if messages := contents.get("messages"):
        last = messages[-1]
        content = _marked_content(last.get("content"), mark)
        return contents if content is None else {**contents, "messages": [*messages[:-1], {**last, "content": content}]}
    if "system" in contents:
        content = _marked_content(contents["system"], mark)
        return contents if content is None else {**contents, "system": content}
    tools = contents["tools"]
    return {**contents, "tools": [*tools[:-1], {**tools[-1], CACHE_CONTROL: mark}]}


def _marked_content(content: object, mark: Mapping[str, str]) -> list[Any] | None:
    if isinstance(content, str):
        return [{"type": "text", "text": content, CACHE_CONTROL: mark}]
    if isinstance(content, list) and content and isinstance(content[-1], dict) and content[-1].get("type") == "text":
        return [*content[:-1], {**content[-1], CACHE_CONTROL: mark}]
    return None


def _check_names(fields: Mapping[str, Any], known: Sequence[str] | set[str] | Mapping[str, str]) -> None:
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise BadRequest(f"{quoted(unknown)} is not a field here; known: {', '.join(sorted(known))}", param=unknown)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _seconds(text: object) -> float | None:
    """Convert a time of RFC 3339 to seconds since 1970."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) and len(text) <= 40 else None
        if found is None or found.tzinfo is None:
            return None
        seconds = found.timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None
