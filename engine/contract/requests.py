"""The part of a request that routing needs, read once from the body. It works for any engine with these endpoints.

Unknown fields are ignored here: the engine behind the gateway honours or refuses them.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from engine.contract.bounded_json import TooManyValues, loads
from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat, canonical_tokens, media_parts
from engine.contract.messages import chat_messages, chat_tools
from engine.contract.responses import kept_by_engine, response_messages, response_tools

TOKEN_ID_BYTES = 4
"""Canonical bytes of a token id."""
ANSWER_SO_FAR = "answer_so_far"
"""Field of a request with the beginning of its answer. Engines whose model card lists it under `accepts` continue that
answer. The tokens of the beginning count in `max_tokens`, and as completion tokens in `usage`."""
MAX_LISTED = 16_384
"""The most messages or prompts in one request: more than any real request has, and few enough not to block others."""
LARGE_BODY_BYTES = 2**18
"""A larger body is parsed with the garbage collector off, which would walk its values, up to millions, repeatedly."""


class Endpoint(StrEnum):
    """Paths of the endpoints whose pod is chosen by prefix: three of OpenAI's API and two of Anthropic's. All except
    COUNT_TOKENS generate."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    """Counts the prompt tokens of a request to MESSAGES. It computes no KV, so it has no keys."""
    RESPONSES = "/v1/responses"


@dataclass(slots=True)
class RequestHead:
    """The data that a router needs before it forwards the bytes untouched. It never changes. It is not frozen,
    because freezing costs a microsecond."""

    model: str | None
    stream: bool
    canonical: bytes
    """If a request has several prompts, the first prompt's bytes: they choose the one pod that gets all prompts."""
    salt: str
    prompts: int = 1
    further_bytes: int = 0
    """Number of canonical bytes of the other prompts."""
    media_parts: int = 0
    """Number of images and the like: each has MEDIA_BYTES of `canonical`."""


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises BadRequest if it is not an object, or has too many
    values."""
    collects = len(body) >= LARGE_BODY_BYTES and gc.isenabled()
    if collects:
        gc.disable()
    try:
        parsed = loads(body)
    except TooManyValues as error:
        raise too_many_values(error) from None
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(parsed, dict):
        raise BadRequest("the request body must be a JSON object")
    return parsed


def too_many_values(error: TooManyValues) -> BadRequest:
    """Return the error of a request whose body has too many values."""
    return BadRequest(f"the request body is not read: {error}", code="too_many_values")


def request_head(endpoint: Endpoint, fields: dict[str, Any]) -> RequestHead:
    """Return the data that routing needs from the parsed body. Raises BadRequest naming a field of the wrong type."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    salt = fields.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise BadRequest("cache_salt must be a string", param="cache_salt")
    if endpoint is Endpoint.COUNT_TOKENS:
        return RequestHead(model, False, b"", "")
    if endpoint is Endpoint.RESPONSES:
        return _response_head(model, bool(stream), salt or "", fields)
    if endpoint is not Endpoint.COMPLETIONS:
        messages, tools = _listed(fields)
        if endpoint is Endpoint.MESSAGES:
            messages, tools = chat_messages(fields.get("system"), messages), chat_tools(tools or ())
        canonical = canonical_chat(messages, tools)
        return RequestHead(model, bool(stream), canonical, salt or "", media_parts=media_parts(messages))
    prompt = fields.get("prompt")
    canonical, further = prompt_bytes(prompt), _further_prompts(prompt)
    size = sum(_size(one) for one in further)
    return RequestHead(model, bool(stream), canonical, salt or "", 1 + len(further), size)


def _response_head(model: str | None, stream: bool, salt: str, fields: dict[str, Any]) -> RequestHead:
    """Return the head of a request to RESPONSES. If the engine stores the beginning of the conversation, the request
    has only the conversation's end, so it has no keys."""
    given, tools = fields.get("input"), fields.get("tools")
    if isinstance(given, list) and len(given) > MAX_LISTED:
        raise BadRequest(f"input has {len(given)} items; at most {MAX_LISTED} are read", param="input")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    messages = response_messages(fields.get("instructions"), given)
    canonical = canonical_chat(messages, response_tools(tools or ()))
    if kept_by_engine(fields) is not None:
        return RequestHead(model, stream, b"", salt, further_bytes=len(canonical))
    if given is None and fields.get("prompt") is None:
        raise BadRequest("input is required: a string or a list of items", param="input")
    return RequestHead(model, stream, canonical, salt, media_parts=media_parts(messages))


def _listed(fields: dict[str, Any]) -> tuple[list[Any], list[Any] | None]:
    """Return the messages and tools of a chat."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    if len(messages) > MAX_LISTED:
        raise BadRequest(f"messages has {len(messages)} entries; at most {MAX_LISTED} are read", param="messages")
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    return messages, tools


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


def _further_prompts(prompt: object) -> list[Any]:
    """Return the prompts after the first, if a request has several."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return []
    if len(prompt) > MAX_LISTED:
        raise BadRequest(f"prompt has {len(prompt)} prompts; at most {MAX_LISTED} are read", param="prompt")
    return prompt[1:]


def _size(prompt: object) -> int:
    """Return the number of canonical bytes of a further prompt. The engine refuses an invalid one."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return TOKEN_ID_BYTES * len(prompt) if isinstance(prompt, list) else 0
