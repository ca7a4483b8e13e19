"""The part of a request that routing needs: read once from the body, for any OpenAI-compatible engine.

Unknown fields are left alone here: the engine behind the gateway honours or refuses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat, canonical_tokens


class Endpoint(StrEnum):
    """The two generating endpoints, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a router must know of a request before it forwards the bytes untouched."""

    model: str | None
    stream: bool
    canonical: bytes
    adapter: str
    salt: str


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises BadRequest when it is not one."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the request body must be a JSON object")
    return parsed


def request_head(endpoint: Endpoint, fields: dict[str, Any]) -> RequestHead:
    """What routing needs of the parsed body. Raises BadRequest naming a field of the wrong type."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    salt = fields.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise BadRequest("cache_salt must be a string", param="cache_salt")
    canonical = _chat_bytes(fields) if endpoint is Endpoint.CHAT else prompt_bytes(fields.get("prompt"))
    return RequestHead(model=model, stream=bool(stream), canonical=canonical, adapter="", salt=salt or "")


def _chat_bytes(fields: dict[str, Any]) -> bytes:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    return canonical_chat(messages, tools)


def prompt_bytes(prompt: object) -> bytes:
    """Canonical bytes of a `/v1/completions` prompt; of several prompts in one request, those of the first."""
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        if isinstance(first, str):
            return first.encode()
        if isinstance(first, list):
            return canonical_tokens(first)
        return canonical_tokens(prompt)
    raise BadRequest("prompt must be a string, a list of strings, or token ids", param="prompt")
